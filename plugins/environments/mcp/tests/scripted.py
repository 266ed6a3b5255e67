"""An MCP server of the standard library alone, which does what its argument says."""

import json
import os
import signal
import subprocess
import sys
import time

MODE = sys.argv[1]
TOOL = {"name": "go", "description": "Go on.", "inputSchema": {"type": "object"}}
COLOURED = {**TOOL, "description": "Go\x1b[2J \u202eon.", "inputSchema": {"type": "object", "title": "\x07!"}}
NOTE = {"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "info", "data": "z" * 9999}}


def say(text):
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def answer(request, result):
    say(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}))


def listed():
    tools = {
        "many": [{**TOOL, "name": f"go{number}"} for number in range(129)],
        "wide": [{**TOOL, "description": "x" * 100_001}],
        "twins": [TOOL, TOOL],
        "blank": [{**TOOL, "name": "go on"}],
        "escape": [{**TOOL, "name": "go\x1b[31m"}],
        "none": [],
        "control": [COLOURED],
    }
    return {"tools": tools.get(MODE, [TOOL]), **({"nextCursor": "more"} if MODE == "pages" else {})}


def call():
    if MODE == "crash":
        sys.stderr.write("out of paper \x1b[31m")
        sys.stderr.flush()
        os._exit(7)
    if MODE == "words":
        sys.stderr.write("e" * 2**26)
        sys.exit()
    if MODE == "broken":
        say('{"jsonrpc": "2.0", "id": ')
    if MODE == "wrong":
        return {"content": "text"}
    while MODE in ("silent", "broken"):
        time.sleep(1)
    content = {
        "picture": [{"type": "image", "data": "", "mimeType": "image/png"}, {"type": "text", "text": "a cat"}],
        "chatty": [{"type": "text", "text": "y" * 500_000}],
    }
    return {"content": content.get(MODE, [{"type": "text", "text": "gone"}])}


if MODE == "exit":
    sys.exit("no licence")
if MODE == "noise":
    say("listening on standard output")
if MODE == "hang":
    time.sleep(1000)
while MODE == "flood":
    say(json.dumps(NOTE))
while MODE == "line":
    sys.stdout.write("{" * 2**16)
if MODE in ("stays", "leaves"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen(["sleep", "1000"])
    with open("pids", "a") as file:
        file.write(f"{os.getpid()} {child.pid} ")

for line in sys.stdin:
    request = json.loads(line)
    if request["method"] == "initialize":
        about = {"capabilities": {"tools": {}}, "serverInfo": {"name": "scripted", "version": "1"}}
        answer(request, {"protocolVersion": request["params"]["protocolVersion"], **about})
    elif request["method"] == "tools/list":
        answer(request, listed())
    elif request["method"] == "tools/call" and MODE == "refuse":
        error = {"code": -32602, "message": "not today \x1b[31m"}
        say(json.dumps({"jsonrpc": "2.0", "id": request["id"], "error": error}))
    elif request["method"] == "tools/call":
        answer(request, call())
    elif "id" in request:
        error = {"code": -32601, "message": "no such method"}
        say(json.dumps({"jsonrpc": "2.0", "id": request["id"], "error": error}))
if MODE == "stays":
    time.sleep(1000)
