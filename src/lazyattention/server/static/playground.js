// SPDX-License-Identifier: Apache-2.0
// The playground page: no framework, no build step. Everything it does goes through the public HTTP API.

const $ = (id) => document.getElementById(id);
const REFRESH_MS = 4000;
const EXAMPLES = [
  { id: "example/lighthouse", title: "Lighthouse", text: "The lighthouse on the northern cape is 42 metres tall. It was built in 1891 of grey granite, and its lamp can be seen from 19 nautical miles away. A keeper lived in it until 1978; since then it has run by itself." },
  { id: "example/harbour", title: "Harbour", text: "The harbour has two basins. The old basin is 4 metres deep and serves fishing boats; the new basin, opened in 2003, is 11 metres deep and takes ferries. Ferries leave every day at 7:30 and at 16:00." },
  { id: "example/museum", title: "Museum", text: "The village museum shows a whaling boat of 1820, a collection of sea charts and the first radio of the rescue station. It is open from May to September, every day but Monday, from ten to five." },
  { id: "example/trail", title: "Coast trail", text: "The coast trail runs for 23 kilometres from the harbour to the cape. Walkers need about seven hours. There is one hut on the way, at kilometre 14, with eight beds and a stove but no food." },
];

const state = { model: null, key: sessionStorage.getItem("key") || "", stored: [], chosen: [], results: new Map(), request: null };

// Talking to the server ------------------------------------------------------------------------------------------------

async function call(path, options = {}) {
  const headers = { "Content-Type": "application/json", ...(state.key ? { Authorization: `Bearer ${state.key}` } : {}) };
  const response = await fetch(path, { ...options, headers });
  if (response.ok) return response;
  if (response.status === 401) $("key-form").hidden = false;
  const body = await response.json().catch(() => null);
  throw new Error(body?.error?.message ?? `the server answered ${response.status}`);
}

async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part === "data: [DONE]") return;
      const event = JSON.parse(part.slice("data: ".length));
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

function chatBody(question, more) {
  const documents = state.chosen.map((id) => ({ id }));
  return JSON.stringify({ model: state.model, messages: [{ role: "user", content: question }], temperature: 0, ...(documents.length ? { documents } : {}), ...more });
}

// Small helpers --------------------------------------------------------------------------------------------------------

function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "onclick") node.addEventListener("click", value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

const nameOf = (entry) => entry?.title || entry?.id || "";
const find = (id) => state.stored.find((entry) => entry.id === id);
const milliseconds = (ms) => (ms >= 1000 ? `${(ms / 1000).toFixed(2)} s` : `${Math.round(ms)} ms`);
const bytes = (n) => (n >= 2 ** 20 ? `${(n / 2 ** 20).toFixed(1)} MiB` : `${(n / 1024).toFixed(0)} KiB`);
const announce = (text) => { $("announcer").textContent = text; };
const badge = (status) => element("span", { class: `badge ${status}` }, { hit: "✓ hit", miss: "○ miss", partial: "◐ partly hit", computed: "○ computed" }[status] ?? status);

function notify(error) {
  $("notice").textContent = error ? error.message : "";
  $("notice").hidden = !error;
}

const guarded = (action) => async (...values) => {
  try { notify(null); await action(...values); } catch (error) { notify(error); }
};

// Documents in the prompt ----------------------------------------------------------------------------------------------

function drawChosen() {
  $("chosen-empty").hidden = state.chosen.length > 0;
  $("chosen").replaceChildren(...state.chosen.map((id, place) => {
    const name = nameOf(find(id)) || id;
    const result = state.results.get(id);
    const handle = element("span", { class: "handle", "aria-hidden": "true", title: "drag to reorder" }, "⠿");
    const moves = element("span", { class: "moves" },
      element("button", { type: "button", class: "icon", "aria-label": `Move ${name} up`, disabled: place === 0, onclick: () => move(place, place - 1, ".up") }, "↑"),
      element("button", { type: "button", class: "icon", "aria-label": `Move ${name} down`, disabled: place === state.chosen.length - 1, onclick: () => move(place, place + 1, ".down") }, "↓"),
      element("button", { type: "button", class: "icon", "aria-label": `Take ${name} out of the prompt`, onclick: () => remove(place) }, "×"));
    const label = element("span", { class: "name", title: name }, name, ...(result ? [" ", badge(result)] : []));
    const item = element("li", { "data-id": id }, handle, element("span", { class: "place" }, `${place + 1}.`), label, moves);
    moves.children[0].classList.add("up");
    moves.children[1].classList.add("down");
    handle.addEventListener("pointerdown", (event) => startDrag(event, item));
    return item;
  }));
}

function move(from, to, focusOn) {
  if (to < 0 || to >= state.chosen.length || from === to) return;
  const [id] = state.chosen.splice(from, 1);
  state.chosen.splice(to, 0, id);
  state.results.clear();
  drawChosen();
  announce(`${nameOf(find(id))} is now number ${to + 1} of ${state.chosen.length}`);
  if (focusOn) {
    const item = $("chosen").children[to];
    (item.querySelector(`${focusOn}:not(:disabled)`) ?? item.querySelector("button:not(:disabled)")).focus();
  }
}

function remove(place) {
  const [id] = state.chosen.splice(place, 1);
  state.results.clear();
  drawChosen();
  drawStore();
  announce(`${nameOf(find(id))} is out of the prompt`);
  ($("chosen").children[Math.min(place, state.chosen.length - 1)]?.querySelector("button:last-child") ?? $("question")).focus();
}

// Pointer events serve mouse, pen and finger alike.
function startDrag(event, item) {
  if (event.button !== 0) return;
  event.preventDefault();
  const list = $("chosen");
  const from = [...list.children].indexOf(item);
  item.classList.add("dragged");
  const follow = (moved) => {
    const others = [...list.children].filter((other) => other !== item);
    const next = others.find((other) => { const box = other.getBoundingClientRect(); return moved.clientY < box.top + box.height / 2; });
    list.insertBefore(item, next ?? null);
  };
  const end = (ended) => {
    for (const [name, listener] of [["pointermove", follow], ["pointerup", end], ["pointercancel", end]]) document.removeEventListener(name, listener);
    item.classList.remove("dragged");
    const to = [...list.children].indexOf(item);
    if (ended.type === "pointercancel") drawChosen();
    else move(from, to);
  };
  document.addEventListener("pointermove", follow);
  document.addEventListener("pointerup", end);
  document.addEventListener("pointercancel", end);
}

// Stored documents -----------------------------------------------------------------------------------------------------

async function refresh() {
  const answer = await (await call("/v1/documents?limit=1000")).json();
  state.stored = answer.data;
  state.chosen = state.chosen.filter((id) => find(id));
  $("store-summary").textContent = answer.num_documents ? `${answer.num_documents} document${answer.num_documents > 1 ? "s" : ""}, ${bytes(answer.num_stored_bytes)} of KV stored, that of documents sent with requests included. Each is computed once, whatever its place in a prompt.` : "Nothing yet.";
  drawStore();
}

function drawStore() {
  // Redrawing would take the focus from whoever is on a button of the table.
  const buttons = () => [...$("store").querySelectorAll("button")];
  const place = buttons().indexOf(document.activeElement);
  const focused = document.activeElement.getAttribute("aria-label");
  $("store").replaceChildren(...state.stored.map((entry) => {
    const name = nameOf(entry);
    const isChosen = state.chosen.includes(entry.id);
    const actions = element("div", { class: "row" },
      element("button", { type: "button", "aria-label": `Add ${name} to the prompt`, disabled: isChosen, onclick: guarded(async () => { state.chosen.push(entry.id); state.results.clear(); drawChosen(); drawStore(); announce(`${name} is number ${state.chosen.length} in the prompt`); }) }, isChosen ? "Added" : "Add"));
    if (!entry.is_read_only) {
      actions.append(
        element("button", { type: "button", class: "plain", "aria-label": `${entry.is_pinned ? "Unpin" : "Pin"} ${name}`, disabled: !entry.is_stored, onclick: guarded(async () => { await call(`/v1/documents/${encodeURIComponent(entry.id)}/${entry.is_pinned ? "unpin" : "pin"}`, { method: "POST", body: entry.is_pinned ? undefined : "{}" }); await refresh(); }) }, entry.is_pinned ? "Unpin" : "Pin"),
        element("button", { type: "button", class: "plain", "aria-label": `Delete ${name}`, onclick: guarded(async () => { const answer = await (await call(`/v1/documents/${encodeURIComponent(entry.id)}`, { method: "DELETE" })).json(); await refresh(); drawChosen(); announce(`Deleted ${name}, ${bytes(answer.num_freed_bytes)} freed`); }) }, "Delete"));
    }
    return element("tr", {},
      element("td", { class: "document" }, name, ...(entry.is_pinned ? [" ", element("span", { class: "badge" }, "pinned")] : [])),
      element("td", {}, entry.is_stored ? element("span", { class: "badge hit" }, "✓ stored") : element("span", { class: "badge" }, "not yet")),
      element("td", { class: "number" }, entry.num_tokens === null ? "–" : String(entry.num_tokens)),
      element("td", { class: "number" }, bytes(entry.num_bytes)),
      element("td", { class: "number" }, entry.num_hits === null ? "–" : String(entry.num_hits)),
      element("td", {}, actions));
  }));
  if (place < 0) return;
  const usable = (button) => !button.disabled;
  // The same button, or the one in its place ("Pin" becomes "Unpin"), or the nearest one that is left.
  const same = buttons().find((button) => usable(button) && button.getAttribute("aria-label") === focused);
  (same ?? buttons().slice(place).find(usable) ?? buttons().findLast(usable) ?? $("store").closest(".scroll")).focus();
}

async function upload(documents) {
  // Not computed now, so that the first question shows misses and the second one hits.
  const answer = await (await call("/v1/documents", { method: "POST", body: JSON.stringify({ documents, warm: false }) })).json();
  await refresh();
  for (const { id } of answer.data) if (!state.chosen.includes(id)) state.chosen.push(id);
  state.results.clear();
  drawChosen();
  drawStore();
  announce(`${answer.data.length} documents are in the prompt`);
}

// Asking ---------------------------------------------------------------------------------------------------------------

async function ask() {
  const question = $("question").value.trim();
  if (!question) return;
  const maxTokens = Math.max(1, Number($("max-tokens").value) || 128);
  state.request = new AbortController();
  const signal = state.request.signal;
  $("ask").disabled = true;
  $("stop").hidden = false;
  $("answer").textContent = "";
  $("result").hidden = true;
  $("status").textContent = "Reading …";
  try {
    const start = performance.now();
    let ttft = null, usage = null, report = null;
    const body = chatBody(question, { max_tokens: maxTokens, stream: true, stream_options: { include_usage: true }, include_document_report: true });
    for await (const event of eventsOf(await call("/v1/chat/completions", { method: "POST", body, signal }))) {
      ttft ??= performance.now() - start;
      report ??= event.documents ?? null;
      usage = event.usage ?? usage;
      const text = event.choices[0]?.delta?.content;
      if (text) { $("answer").append(text); $("answer").scrollTop = $("answer").scrollHeight; $("status").textContent = "Answering …"; }
    }
    const seconds = (performance.now() - start) / 1000;
    $("status").textContent = `${usage.completion_tokens} tokens in ${seconds.toFixed(1)} s. ${usage.prompt_tokens_details.cached_tokens} of ${usage.prompt_tokens} prompt tokens were reused.`;
    showReport(report ?? []);
    showTimes(ttft, null);
    $("result").hidden = false;
    if ($("compare").checked) {
      $("ttft-full").textContent = "measuring …";
      const fullStart = performance.now();
      await (await call("/v1/chat/completions", { method: "POST", body: chatBody(question, { max_tokens: 1, reuse: "never" }), signal })).json();
      showTimes(ttft, performance.now() - fullStart);
    }
    await refresh();
  } catch (error) {
    if (error.name !== "AbortError") throw error;
    $("status").textContent = "Stopped.";
  } finally {
    $("ask").disabled = false;
    $("stop").hidden = true;
    if ($("ttft-full").textContent === "measuring …") $("ttft-full").textContent = "not measured";
  }
}

function showReport(report) {
  state.results = new Map(report.map((entry) => [entry.id, entry.status]));
  drawChosen();
  $("report").replaceChildren(...report.map((entry) => element("tr", {},
    element("td", { class: "document" }, nameOf(entry)),
    element("td", {}, badge(entry.status)),
    element("td", {}, entry.reason),
    element("td", { class: "number" }, `${entry.num_reused_tokens} / ${entry.num_tokens}`),
    element("td", { class: "number" }, bytes(entry.num_bytes)))));
}

function showTimes(reuse, full) {
  const longest = Math.max(reuse, full ?? 0);
  $("bar-reuse").style.width = `${(70 * reuse) / longest}%`;
  $("bar-full").style.width = full ? `${(70 * full) / longest}%` : "0";
  $("ttft-reuse").textContent = milliseconds(reuse);
  $("ttft-full").textContent = full ? milliseconds(full) : "not measured";
  const isCold = [...state.results.values()].includes("miss");
  if (isCold) $("verdict").textContent = "Some documents were computed for this question. Ask again, in any order, to see them reused.";
  else if (full) $("verdict").textContent = full > reuse ? `${(full / reuse).toFixed(1)} times faster with reuse.` : "No gain on a prompt this short.";
  else $("verdict").textContent = "";
}

// Start ----------------------------------------------------------------------------------------------------------------

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  $("theme").textContent = theme === "dark" ? "Light" : "Dark";
  $("theme").setAttribute("aria-label", theme === "dark" ? "Switch to light colours" : "Switch to dark colours");
}

async function connect() {
  const models = await (await call("/v1/models")).json();
  state.model = models.data[0].id;
  $("model").textContent = `${state.model}, up to ${models.data[0].max_model_len} tokens, ${models.data[0].reuse_method}`;
  $("key-form").hidden = true;
  await refresh();
}

setTheme(localStorage.getItem("theme") ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
$("theme").addEventListener("click", () => { const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark"; localStorage.setItem("theme", next); setTheme(next); });
$("key-form").addEventListener("submit", guarded(async (event) => { event.preventDefault(); state.key = $("key").value; sessionStorage.setItem("key", state.key); await connect(); }));
$("examples").addEventListener("click", guarded(() => upload(EXAMPLES)));
$("add-form").addEventListener("submit", guarded(async (event) => { event.preventDefault(); await upload([{ text: $("text").value, title: $("title").value.trim() || null }]); event.target.reset(); }));
$("files").addEventListener("change", guarded(async () => { const files = [...$("files").files]; await upload(await Promise.all(files.map(async (file) => ({ id: file.name, title: file.name, text: await file.text() })))); $("files").value = ""; }));
$("ask-form").addEventListener("submit", guarded(async (event) => { event.preventDefault(); await ask(); }));
$("question").addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("ask-form").requestSubmit(); });
$("stop").addEventListener("click", () => state.request?.abort());
guarded(connect)();
setInterval(() => { if (state.model && !document.hidden) refresh().catch(() => {}); }, REFRESH_MS);
