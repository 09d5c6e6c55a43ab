"""
Writes airline/rollouts.jsonl.gz from the file that tau-bench publishes, or checks what is shipped.

    python recipes/data/make_rollouts.py gpt-4o-airline.json    # its `historical_trajectories`: write
    python recipes/data/make_rollouts.py --check                # fail unless the files are those of the README

What a rollout of yours may need too: arguments of tool calls as JSON values, since chat templates write them out
themselves, and no message without `content`. Standard library only.
"""

import argparse
import gzip
import hashlib
import json
from collections import Counter
from pathlib import Path


HERE = Path(__file__).resolve().parent
TASKS = 30
SHA_256 = {  # of the text, so that another gzip may pack it
    "airline/rollouts.jsonl.gz": "32a90a1d3bf226ed19c9d97124c3a3b2ce062c452548ef7f3b2116c217bb6988",
    "gsm8k/pairs.jsonl.gz": "b83d345be87672cb79c064e2c1952a5d75b8dfae51e6ac4d0c659091bee5eb19",
}


def message(said):
    """A message as chat templates take it."""
    kept = {"role": said["role"], "content": said.get("content") or ""}
    if said.get("tool_calls"):
        kept["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {
                    "name": call["function"]["name"],
                    "arguments": json.loads(call["function"]["arguments"]),
                },
            }
            for call in said["tool_calls"]
        ]
    return kept | {name: said[name] for name in ("name", "tool_call_id") if said.get(name)}


def rollouts(published):
    """The trials of the first tasks, a row for each."""
    rows = [
        {
            "task": row["task_id"],
            "trial": row["trial"],
            "reward": float(row["reward"]),
            "messages": [message(said) for said in row["traj"]],
        }
        for row in published
        if row["task_id"] < TASKS
    ]
    return sorted(rows, key=lambda row: (row["task"], row["trial"]))


def check():
    """Fail unless the shipped files have the texts, and the numbers, that the README names."""
    for name, digest in SHA_256.items():
        text = gzip.decompress((HERE / name).read_bytes())
        if hashlib.sha256(text).hexdigest() != digest:
            raise SystemExit(f"{HERE / name} is not the file that was shipped")
        rows = [json.loads(line) for line in text.splitlines()]
        found = f"{len(rows)} rows"
        if "messages" in rows[0]:
            tasks, good = Counter(row["task"] for row in rows), sum(row["reward"] == 1 for row in rows)
            turns = sum(said["role"] == "assistant" for row in rows for said in row["messages"])
            found += f", {len(tasks)} tasks x {set(tasks.values())} trials, {good} with reward 1, {turns} turns"
        print(f"{name}: {found}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("published", nargs="?", type=Path, help="gpt-4o-airline.json of tau-bench")
    parser.add_argument("--check", action="store_true", help="look at the files that are shipped")
    given = parser.parse_args()
    if given.published:
        rows = rollouts(json.loads(given.published.read_text(encoding="utf-8")))
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (HERE / "airline/rollouts.jsonl.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
    if given.check or not given.published:
        check()


if __name__ == "__main__":
    main()
