"""A threaded WSGI server whose request threads send commands: `POST /tea` votes for tea, `GET /` shows the results.

Ctrl+C stops it in order. Optional argument: the port.
"""

import json
import sys
import threading
from collections.abc import Iterable
from functools import partial
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from anyio.from_thread import BlockingPortal

from trio_wow.app import serving_in_thread
from trio_wow.errors import AdmissionClosedError
from trio_wow.messages import CommandResult
from votes import Vote, app, results

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment


class Application:
    """Answers requests, each in whatever thread the server runs it."""

    def __init__(self, portal: BlockingPortal) -> None:
        self.portal = portal

    def __call__(self, environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
        """Answer one request."""
        status, answer = "200 OK", dict(results)
        if environ["REQUEST_METHOD"] == "POST":
            option = environ["PATH_INFO"].strip("/")
            send = partial(app.gateway.send_and_wait, timeout=10)
            try:
                result: CommandResult = self.portal.call(send, Vote(option))
                answer = {option: result.raise_for_error().version or 0}
            except AdmissionClosedError:
                status, answer = "503 Service Unavailable", {}
        start_response(status, [("Content-Type", "application/json")])
        return [json.dumps(answer).encode()]


class Server(ThreadingMixIn, WSGIServer):
    """A thread for each request; closing it waits for them."""

    request_queue_size = 100


class Handler(WSGIRequestHandler):
    """Logs nothing."""

    def log_message(self, *args: object) -> None:
        """Stay silent."""


def main(port: int) -> None:
    """Serve until Ctrl+C, or until the runtime fails."""
    runtime = app.runtime()
    # The server is closed first, so that its last requests still find the runtime.
    with serving_in_thread(runtime) as portal, Server(("127.0.0.1", port), Handler) as server:
        server.set_app(Application(portal))

        def follow() -> None:
            portal.call(runtime.wait_stopped)
            server.shutdown()

        threading.Thread(target=follow, daemon=True).start()
        print(f"http://127.0.0.1:{server.server_port}/", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("stopping", flush=True)
    print(dict(results))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 8000)
