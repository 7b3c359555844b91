"""Sessions: the header that names a conversation, and what is done before its request is queued.

Owns: the header's check, the policy for requests without one, the number of requests that are
prepared at a time. Knows nothing of: directories, transfers, engines. Runs without torch.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

from starlette.requests import Request

from deepdraft.config import ServerConfig
from deepdraft.errors import RequestError
from deepdraft.server.identify import given_id, trace_id

if TYPE_CHECKING:
    from deepdraft.server.job import Job
    from deepdraft.server.service import Service

PREPARED = 6
"""Requests that are looked up and fetched at a time while others are answered."""


class Sessions:
    """Before a job is queued: whose conversation is it, and is it here?"""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._settings: ServerConfig = service.config.server
        self._workers = ThreadPoolExecutor(PREPARED, "deepdraft-prepare")

    def key(self, request: Request, tenant: str) -> str | None:
        """The conversation's key; None without the header. Raises RequestError for a bad id."""
        from deepdraft.kv.directory import session_key

        given = request.headers.get(self._settings.session_header)
        if given is None:
            return None
        return session_key(tenant, given, self._settings.session_header)

    async def prepare(self, request: Request, job: Job, tenant: str) -> None:
        """Gives the job's engine requests their session.

        Raises RequestError for a bad id, and where the policy asks for one that is missing.
        """
        key = self.key(request, tenant)
        if key is None:
            if job.multi_turn and self._settings.session_policy == "require":
                raise RequestError(
                    f"this server needs the header {self._settings.session_header} for "
                    "conversations of several turns",
                    param=self._settings.session_header,
                )
            return
        fleet = self._service.fleet
        if fleet is None:
            return
        loop = asyncio.get_running_loop()
        self._service.num_preparing += 1
        try:
            prompt = job.requests[0].prompt_ids
            trace = trace_id(request) or given_id(request) or job.id
            session = await loop.run_in_executor(self._workers, fleet.prepare, key, prompt, trace)
        finally:
            self._service.num_preparing -= 1
        job.requests = [replace(r, session=session) for r in job.requests]

    def close(self) -> None:
        """Ends the workers, without waiting for a fetch."""
        self._workers.shutdown(wait=False, cancel_futures=True)
