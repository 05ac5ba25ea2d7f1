// SPDX-License-Identifier: Apache-2.0
// Shows /openapi.json as a page: routes, fields, answers. Needs nothing from elsewhere.

const dark = localStorage.getItem("theme") ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
document.documentElement.dataset.theme = dark;

function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

const description = await (await fetch("/openapi.json")).json();
const schemas = description.components.schemas;
const nameOf = (schema) => schema.$ref.split("/").pop();

function typeOf(schema) {
  if (schema.$ref) return [element("a", { href: `#${nameOf(schema)}` }, nameOf(schema))];
  const options = schema.anyOf ?? schema.oneOf;
  if (options) return options.flatMap((option, place) => (place ? [" or ", ...typeOf(option)] : typeOf(option)));
  if (schema.type === "array") return ["list of ", ...typeOf(schema.items ?? {})];
  if (schema.const !== undefined) return [JSON.stringify(schema.const)];
  if (schema.enum) return [schema.enum.map((value) => JSON.stringify(value)).join(" or ")];
  return [schema.type ?? "anything"];
}

function limitsOf(schema) {
  const words = { minimum: "at least", maximum: "at most", exclusiveMinimum: "above", exclusiveMaximum: "below", minLength: "min. length", maxLength: "max. length", minItems: "min. entries", maxItems: "max. entries" };
  const parts = [schema, ...(schema.anyOf ?? [])].flatMap((part) => Object.entries(words).filter(([key]) => part[key] !== undefined).map(([key, word]) => `${word} ${part[key]}`));
  return parts.join(", ");
}

function fieldTable(name, schema) {
  const rows = Object.entries(schema.properties ?? {}).map(([key, field]) => element("tr", {},
    element("td", {}, element("code", {}, key), (schema.required ?? []).includes(key) ? " (required)" : ""),
    element("td", {}, ...typeOf(field)),
    element("td", {}, [limitsOf(field), field.description ?? ""].filter(Boolean).join(". "))));
  const head = element("tr", {}, ...["Field", "Type", "Meaning"].map((text) => element("th", { scope: "col" }, text)));
  return element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `Fields of ${name}` }, element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows)));
}

const cards = [];
for (const [path, operations] of Object.entries(description.paths)) {
  for (const [method, operation] of Object.entries(operations)) {
    const card = element("section", { class: "card" }, element("h2", {}, element("code", {}, `${method.toUpperCase()} ${path}`)), element("p", {}, operation.description ?? ""));
    const body = operation.requestBody?.content["application/json"]?.schema;
    if (body) card.append(element("p", {}, "Body: ", ...typeOf(body)));
    for (const parameter of operation.parameters ?? []) card.append(element("p", {}, `In the ${parameter.in}: `, element("code", {}, parameter.name), ", ", ...typeOf(parameter.schema)));
    const answer = operation.responses["200"]?.content?.["application/json"]?.schema;
    if (answer) card.append(element("p", {}, "Answer: ", ...typeOf(answer)));
    cards.push(card);
  }
}
for (const [name, schema] of Object.entries(schemas)) {
  if (schema.properties) cards.push(element("section", { class: "card", id: name }, element("h2", {}, name), element("p", {}, schema.description ?? ""), fieldTable(name, schema)));
}
document.getElementById("operations").replaceChildren(...cards);
if (location.hash) document.querySelector(location.hash)?.scrollIntoView();
