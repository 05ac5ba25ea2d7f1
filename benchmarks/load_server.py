# SPDX-License-Identifier: Apache-2.0
"""Load on a running server: holds N streams open for minutes, or lets requests arrive at a fixed rate (open loop).

Every answer is compared with the answer to the same request sent alone before; lost, duplicated or mixed-up text shows.
Prints one JSON object. Only against a server of your own on this machine:

    lazyattention serve --port 8000 &
    python benchmarks/load_server.py --streams 200 --duration-s 180 --server-pid $!
    python benchmarks/load_server.py --rate 20 --duration-s 60
"""

import argparse
import asyncio
import ipaddress
import json
import platform
import random
import socket
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

FACTS = [
    "The lighthouse on the northern cape is 42 metres tall. It was built in 1891 of grey granite.",
    "The harbour has two basins. Ferries leave every day at 7:30 and at 16:00, all year round.",
    "The museum shows a whaling boat of 1820. It is open from May to September, except on Mondays.",
    "The coast trail runs for 23 kilometres. There is one hut on the way, with eight beds and a stove.",
    "The rescue station has three boats. The oldest was built in 1938 and still sails on holidays.",
    "The school has forty pupils and two teachers. Lessons begin at eight and end at one o'clock.",
]
QUESTIONS = [
    "How tall is the lighthouse?",
    "When do ferries leave?",
    "How long is the trail?",
    "How many pupils are there?",
]


@dataclass
class Result:
    """What all requests together saw."""

    num_done: int = 0
    num_tokens: int = 0
    num_wrong: int = 0
    statuses: Counter[int | str] = field(default_factory=Counter)
    ttft_s: list[float] = field(default_factory=list)
    itl_s: list[float] = field(default_factory=list)
    wrong: list[dict[str, Any]] = field(default_factory=list)
    max_open: int = 0
    num_open: int = 0


@dataclass
class Load:
    """What is sent, what must come back, and what did."""

    client: httpx.AsyncClient
    requests: list[dict[str, Any]]
    expected: list[tuple[str, int] | None]
    result: Result


def make_requests(count: int, max_tokens: int, model: str) -> list[dict[str, Any]]:
    """Distinct requests over few documents in many orders."""
    generator = random.Random(1)
    requests = []
    for number in range(count):
        documents = generator.sample(FACTS, 3)
        text = f"{generator.choice(QUESTIONS)} (Guest {number})"
        requests.append(
            {
                "model": model,
                "messages": [{"role": "user", "content": text}],
                "documents": documents,
                "temperature": 0.8 if number % 2 else 0,
                "seed": number,
                "max_tokens": max_tokens,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )
    return requests


async def ask(
    client: httpx.AsyncClient, request: dict[str, Any], result: Result | None = None
) -> tuple[str, int] | None:
    """Send one request and read its stream; returns the text, or None when it was refused."""
    start = last = time.perf_counter()
    text, usage, is_first = [], None, True
    async with client.stream("POST", "/v1/chat/completions", json=request) as response:
        if result is not None:
            result.statuses[response.status_code] += 1
        if response.status_code != 200:
            await response.aread()
            return None
        is_complete = False
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                is_complete = True
            elif line.startswith("data: "):
                event = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(event["error"]["message"])
                usage = event["usage"] or usage
                piece = event["choices"][0]["delta"].get("content") if event["choices"] else None
                if piece:
                    text.append(piece)
                    now = time.perf_counter()
                    if result is not None:
                        (result.ttft_s if is_first else result.itl_s).append(now - (start if is_first else last))
                    last, is_first = now, False
    if not is_complete or usage is None:
        raise RuntimeError("the stream ended before [DONE]")
    if result is not None:
        result.num_tokens += usage["completion_tokens"]
    return "".join(text), usage["completion_tokens"]


async def run_one(load: Load, number: int) -> None:
    """One request of the load, checked against its solo run."""
    index, result = number % len(load.requests), load.result
    result.num_open += 1
    result.max_open = max(result.max_open, result.num_open)
    try:
        answer = await ask(load.client, load.requests[index], result)
    except (httpx.HTTPError, RuntimeError) as error:
        result.statuses[f"{type(error).__name__}: {error}"[:100]] += 1
        return
    finally:
        result.num_open -= 1
    if answer is not None:
        result.num_done += 1
        if answer != load.expected[index]:
            result.num_wrong += 1
            result.wrong = [*result.wrong, {"request": index, "alone": load.expected[index], "loaded": answer}][:5]


async def hold(load: Load, num_streams: int, duration_s: float) -> None:
    """Keep `streams` requests open until the time is over, then let them end."""
    end, numbers = time.monotonic() + duration_s, iter(range(10**9))

    async def user() -> None:
        while time.monotonic() < end:
            await run_one(load, next(numbers))

    await asyncio.gather(*(user() for _ in range(num_streams)))


async def arrive(load: Load, rate: float, duration_s: float) -> None:
    """Requests arrive at random, `rate` a second on average, however long answers take."""
    end, tasks, generator = time.monotonic() + duration_s, [], random.Random(2)
    while time.monotonic() < end:
        tasks.append(asyncio.create_task(run_one(load, len(tasks))))
        await asyncio.sleep(generator.expovariate(rate))
    await asyncio.gather(*tasks)


async def watch_memory(pid: int, samples: list[int]) -> None:
    """Resident bytes of the server, once a second."""
    while True:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        samples.append(pages * 4096)
        await asyncio.sleep(1)


def is_this_machine(url: str) -> bool:
    """True if the host is a loopback address or this machine's own name."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(socket.gethostbyname(host)).is_loopback
    except OSError:
        return False


def summary(values: list[float]) -> dict[str, float] | None:
    """Median and tails, in milliseconds."""
    if not values:
        return None
    ordered = sorted(values)
    at = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    return {
        name: round(1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 1) for name, share in at.items()
    }


async def main(arguments: argparse.Namespace) -> int:
    """Run the load and print what happened."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=arguments.url, timeout=600, limits=limits) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        requests = make_requests(arguments.requests, arguments.max_tokens, model)
        expected = [await ask(client, request) for request in requests]
        result, memory = Result(), list[int]()
        load = Load(client, requests, expected, result)
        watcher = asyncio.create_task(watch_memory(arguments.server_pid, memory)) if arguments.server_pid else None
        start = time.monotonic()
        if arguments.rate:
            await arrive(load, arguments.rate, arguments.duration_s)
        else:
            await hold(load, arguments.streams, arguments.duration_s)
        duration_s = time.monotonic() - start
        if watcher:
            watcher.cancel()
        metrics = (await client.get("/metrics")).text
    tenth = max(1, len(memory) // 10)
    report = {
        "model": model,
        "mode": f"open loop, {arguments.rate} a second" if arguments.rate else f"{arguments.streams} streams held",
        "machine": f"{platform.machine()}, {platform.system()}",
        "duration_s": round(duration_s, 1),
        "max_open_streams": result.max_open,
        "num_done": result.num_done,
        "num_wrong": result.num_wrong,
        "wrong": result.wrong,
        "statuses": {str(status): count for status, count in result.statuses.items()},
        "output_tokens_per_s": round(result.num_tokens / duration_s, 1),
        "ttft_ms": summary(result.ttft_s),
        "itl_ms": summary(result.itl_s),
    }
    if memory:
        report["rss_mib"] = {
            "after_a_tenth": round(statistics.median(memory[tenth : 2 * tenth] or memory) / 2**20),
            "at_the_end": round(statistics.median(memory[-tenth:]) / 2**20),
            "peak": round(max(memory) / 2**20),
        }
    for name in ("store_hit_tokens", "store_miss_tokens", "engine_preemptions"):
        values = [line.split()[1] for line in metrics.splitlines() if line.startswith(f"lazyattention_{name}_total ")]
        report[name] = float(values[0]) if values else None
    text = json.dumps(report, indent=2)
    print(text)
    if arguments.output:
        arguments.output.write_text(text + "\n")
    return 0 if result.num_wrong == 0 and result.num_done else 1


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--streams", type=int, default=200, help="streams held open")
    parser.add_argument("--rate", type=float, help="requests a second, instead of --streams")
    parser.add_argument("--duration-s", type=float, default=180)
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--requests", type=int, default=60, help="distinct requests")
    parser.add_argument("--server-pid", type=int, help="watch this process's memory")
    parser.add_argument("--output", type=Path, help="also write the JSON here")
    arguments = parser.parse_args()
    if not is_this_machine(arguments.url):
        parser.error(f"{arguments.url} is not this machine; this program loads servers on this machine only")
    return arguments


if __name__ == "__main__":
    raise SystemExit(asyncio.run(main(parse())))
