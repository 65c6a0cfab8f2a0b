"""python -m jhybrid.serve: load a model and answer OpenAI requests over HTTP."""

from __future__ import annotations

import argparse
import logging
import signal
import socket
from collections.abc import Sequence

import uvicorn

from jhybrid.engine.arguments import add_engine_arguments
from jhybrid.engine.interface import EngineProtocol
from jhybrid.serve.app import create_app

# Longer than load generators pause between requests: closing first would race with their next.
KEEP_ALIVE_SECONDS = 75


class Server(uvicorn.Server):
    """uvicorn that says where it listens once it does."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for server in self.servers:
            for listening in server.sockets:
                host, port = listening.getsockname()[:2]
                host = f"[{host}]" if ":" in host else host
                print(f"jhybrid is ready on http://{host}:{port}", flush=True)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m jhybrid.serve", description=__doc__)
    add_engine_arguments(parser)
    server = parser.add_argument_group("server")
    server.add_argument("--host", default="127.0.0.1")
    server.add_argument("--port", type=_port, default=8000, help="0 picks a free one")
    server.add_argument("--api-key", type=_key, help="clients must send it as a bearer token")
    server.add_argument("--served-model-name", metavar="NAME", help="name in the API")
    server.add_argument(
        "--log-level", default="info", choices=("debug", "info", "warning", "error", "critical")
    )
    return parser.parse_args(argv)


def _port(text: str) -> int:
    if not (text.isdecimal() and int(text) < 1 << 16):
        raise argparse.ArgumentTypeError(f"expected a port from 0 to 65535, got {text!r}")
    return int(text)


def _key(text: str) -> str:
    if not text.strip():  # of a variable that is not set, say: no client could send it
        raise argparse.ArgumentTypeError(f"expected a key, got {text!r}")
    return text


def build_engine(args: argparse.Namespace) -> EngineProtocol:
    # Imported late: --help and wrong flags answer without loading JAX.
    from jhybrid.engine.build import build_engine

    return build_engine(args)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    # The level is for our own lines; at "info" some libraries narrate every file that they open.
    logging.basicConfig(level="WARNING", format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("jhybrid").setLevel(args.log_level.upper())
    # Bound before the model loads, so that a port where somebody listens is known at once and not
    # minutes later. (Two servers that load at the same time find out when they start to listen.)
    listening = bind(args.host, args.port)
    try:
        engine = build_engine(args)
    except ValueError as error:  # a flag or a checkpoint is at fault, and the message says which
        listening.close()
        raise SystemExit(f"error: {error}") from None
    serve(engine, args, listening)


def bind(host: str, port: int) -> socket.socket:
    family, kind, proto, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listening = socket.socket(family, kind, proto)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(address)
    except OSError as error:
        listening.close()
        raise SystemExit(f"cannot listen on {host}:{port}: {error.strerror}") from None
    return listening


def serve(engine: EngineProtocol, args: argparse.Namespace, listening: socket.socket) -> None:
    """Serve until SIGTERM or SIGINT, then finish what runs and return."""
    app = create_app(engine, served_model_name=args.served_model_name, api_key=args.api_key)
    config = uvicorn.Config(
        app,
        log_level=args.log_level,
        access_log=args.log_level == "debug",
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
    )
    # uvicorn drains on these signals and then raises them again for whoever handled them before
    # it. That is us, and a drained server has ended well: exit status 0.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    Server(config).run(sockets=[listening])


if __name__ == "__main__":
    main()
