# SPDX-License-Identifier: Apache-2.0
"""`actorserve start`: a supervisor, its front end, signals, and what people see of it.

bind ─► open ─► HTTP (live, not ready) ─► load models ─► table, ready file ─► serve
SIGTERM, SIGINT ─► not ready, drain, stop ─► exit code 0;  a second signal: quick
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from actorserve import __version__
from actorserve.actors import server_log
from actorserve.actors.repository import Repository
from actorserve.actors.server_log import ServerLog
from actorserve.actors.supervisor import Supervisor
from actorserve.config import Settings, unknown_variables
from actorserve.errors import ConfigError
from actorserve.frontend.colour import is_coloured
from actorserve.frontend.greeting import greeting
from actorserve.frontend.http_server import HttpServer
from actorserve.frontend.http_settings import HttpSettings
from actorserve.frontend.init_process import reap_orphans
from actorserve.frontend.malloc import tune_malloc
from actorserve.frontend.notify import Notifier
from actorserve.frontend.operator import read_token
from actorserve.frontend.table import model_table

LISTEN_BACKLOG = 2048
MOST_DESCRIPTORS = 1 << 16
"""Not beyond: some programs that a model may start close every descriptor up to the limit."""

_log = logging.getLogger("actorserve")


def run(settings: Settings, ignored_flags: Sequence[str] = ()) -> int:
    """Serve until a signal; returns the exit code. Raises ConfigError for what cannot be."""
    _fill_standard_descriptors()
    with server_log.installed(settings) as log:
        for flag in ignored_flags:
            _log.warning("%s has no meaning here and is ignored", flag)
        for warning in unknown_variables():
            _log.warning("%s", warning)
        _remove_old_ready_file(settings.ready_file)
        tune_malloc()
        _raise_descriptor_limit()
        with contextlib.ExitStack() as sockets:
            listener = sockets.enter_context(_listen(settings.host, settings.http_port))
            Repository(settings.model_repository).check()
            metrics = None
            if settings.allow_metrics:
                host = settings.metrics_address or settings.host
                flag = "--metrics-port"
                metrics = sockets.enter_context(_listen(host, settings.metrics_port, flag))
            return _run_loop(_Serving(settings, listener, metrics, log).run())


def _fill_standard_descriptors() -> None:
    """Put /dev/null where 0, 1 or 2 are closed: a socket of that number would be taken for them.

    (libuv aborts the process when it is to close one.)
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)


def _raise_descriptor_limit() -> None:
    """Use what the system grants: each stub takes about 14 descriptors, each connection one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _remove_old_ready_file(name: str) -> None:
    """Remove what an earlier server wrote. Raises ConfigError where no new one could be written."""
    if not name:
        return
    path = Path(name)
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"--ready-file '{path}': {error.strerror}") from None
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"--ready-file '{path}': its folder is missing or not writable")


def _run_loop(coroutine: Coroutine[Any, Any, int]) -> int:
    """Run on uvloop where it is installed."""
    try:
        import uvloop
    except ModuleNotFoundError:
        return asyncio.run(coroutine)
    return int(uvloop.run(coroutine))


def _listen(host: str, port: int, flag: str = "") -> socket.socket:
    """Bind a port before anything starts. Raises ConfigError that names it, and its flag."""
    where = f"{host}:{port}" + (f" ({flag})" if flag else "")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"cannot listen on {where}: {error.strerror}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(LISTEN_BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise ConfigError(f"cannot listen on {where}: {reason}") from None
    return listener


def _url_of(listener: socket.socket) -> str:
    """Return where a socket listens, as a URL."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Serving:
    """One life of the server."""

    def __init__(
        self,
        settings: Settings,
        listener: socket.socket,
        metrics: socket.socket | None,
        log: ServerLog,
    ) -> None:
        self._settings = settings
        self._server_log = log
        self._console = log.console
        self._listener = listener
        self._metrics = metrics
        self._server = Supervisor(settings.model_repository, settings)
        self._signalled = asyncio.Event()
        self._notifier = Notifier()
        self._token = read_token(settings.admin_token_file)

    async def run(self) -> int:
        """Serve; returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            loop.add_signal_handler(number, _log.info, f"{number.name} has no meaning here")
        reap_orphans(loop, lambda: self._server.zygote_pid)
        await self._server.open()
        http = HttpServer(self._server, self._http_settings(), [self._listener])
        scraped = HttpServer(
            self._server,
            HttpSettings(only_metrics=True, codec_threads=1),
            [self._metrics] if self._metrics is not None else [],
        )
        await http.start()
        await scraped.start()
        try:
            code = await self._serve()
        finally:
            self._notifier.stopping()
            self._server.begin_stop()
            await self._server.stop()
            await asyncio.gather(http.stop(), scraped.stop())
        _log.info("stopped")
        return code

    def _http_settings(self) -> HttpSettings:
        return HttpSettings(
            max_input_bytes=self._settings.http_max_input_bytes,
            head_timeout_s=self._settings.http_head_timeout_s,
            strict_json=self._settings.strict_json,
            server_name=self._settings.id,
            admin_token=self._token,
            has_metrics=self._settings.allow_metrics,
            log=self._server_log,
        )

    def _on_signal(self, number: signal.Signals) -> None:
        if self._signalled.is_set():
            _log.info("%s again: stopping at once", signal.Signals(number).name)
            self._server.hurry()
            return
        _log.info("%s: stopping when accepted work has ended", signal.Signals(number).name)
        self._server.begin_stop()
        self._signalled.set()

    async def _serve(self) -> int:
        """Load the models and wait for a signal."""
        url = _url_of(self._listener)
        _log.info("actorserve %s: HTTP on %s", __version__, url)
        if self._metrics is not None:
            _log.info("metrics on %s/metrics", _url_of(self._metrics))
        loading = asyncio.ensure_future(self._server.load_models())
        signalled = asyncio.ensure_future(self._signalled.wait())
        await asyncio.wait([loading, signalled], return_when=asyncio.FIRST_COMPLETED)
        if self._signalled.is_set():
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
            return 0
        loading.result()
        stats = self._server.stats()
        self._console.write(model_table(stats, is_coloured=is_coloured(sys.stderr)))
        if self._server.failures and self._settings.exit_on_error:
            signalled.cancel()
            names = ", ".join(sorted(self._server.failures))
            _log.error("exiting, since these models did not load: %s", names)
            return 1
        note = greeting(
            url,
            self._server.is_ready(),
            self._server.served_models(),
            is_coloured=is_coloured(sys.stderr),
        )
        self._console.write(note)
        self._write_ready_file()
        self._notifier.ready()
        await signalled
        return 0

    def _write_ready_file(self) -> None:
        """Write the addresses as JSON, whole or not at all."""
        if not self._settings.ready_file:
            return
        path = Path(self._settings.ready_file)
        part = path.with_name(path.name + ".part")
        where: dict[str, object] = {"pid": os.getpid()}
        for name, listener in (("http", self._listener), ("metrics", self._metrics)):
            if listener is not None:
                host, port = listener.getsockname()[:2]
                where[name] = {"host": host, "port": port}
        try:
            part.write_text(json.dumps(where))
            part.replace(path)
        except OSError as error:
            _log.error("cannot write --ready-file '%s': %s", path, error.strerror)
