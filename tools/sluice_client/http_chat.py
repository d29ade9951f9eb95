"""Asks a gateway for one chat completion over OpenAI's HTTP and prints it as it comes, for tools/demo --router."""

import argparse
import json
import sys
import time

import requests

RETRY_S = 0.2


def pieces(url: str, model: str, prompt: str, max_tokens: int):
    """Yields the answer's text piece by piece. Raises the errors of requests; an HTTPError holds the refusal."""
    body = {"model": model, "messages": [{"role": "user", "content": prompt}], "temperature": 0,
            "max_tokens": max_tokens, "stream": True}
    with requests.post(f"{url}/v1/chat/completions", json=body, stream=True, timeout=60) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if not line.startswith(b"data: ") or line == b"data: [DONE]":
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise requests.RequestException(event["error"].get("message", event["error"]))
            for choice in event["choices"]:
                if text := choice["delta"].get("content"):
                    yield text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True, help="URL of the gateway, such as http://127.0.0.1:30000")
    parser.add_argument("--model", required=True, help="name of the model")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--wait", type=float, default=0, metavar="S",
                        help="seconds to wait for a gateway that is starting (default 0)")
    args = parser.parse_args()
    give_up = time.monotonic() + args.wait
    while True:
        began, first, count = time.monotonic(), None, 0
        try:
            for text in pieces(args.url, args.model, args.prompt, args.max_tokens):
                first = first or time.monotonic() - began
                count += 1
                print(text, end="", flush=True)
            break
        except requests.RequestException as error:
            # As long as nothing was printed: the gateway is not up yet, or has no healthy node or no tokenizer yet.
            starting = isinstance(error, requests.ConnectionError) or (
                error.response is not None and error.response.status_code in (404, 503))
            if count or not starting or time.monotonic() > give_up:
                detail = error.response.text if error.response is not None else error
                print(f"http_chat: {args.url}: {detail}", file=sys.stderr)
                return 1
            time.sleep(RETRY_S)
    print(f"\n{count} pieces, first after {first or 0:.3f} s, all in {time.monotonic() - began:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
