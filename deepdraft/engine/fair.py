"""Whose turn it is: the queues of tenants, their shares and caps.

Owns: the order of waiting requests, across tenants and within one; what each tenant has used.
Knows nothing of: sequences, steps, time. Everything here runs without torch.

A free place goes to the tenant with the fewest running requests for its weight; of equals, to the
one that has used the least. So a tenant that asks for little never waits behind another's queue.
"""

from bisect import insort
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from deepdraft.engine.request import Request
from deepdraft.errors import DeepdraftError


class RateLimited(DeepdraftError):
    """A tenant has more requests at hand than it may have (HTTP 429)."""

    http_status = 429
    kind = "rate_limit_error"
    code = "rate_limit_exceeded"


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """What one tenant may hold. None: only the server's own limits count."""

    weight: float = 1.0
    """Its share of a busy server, compared with others."""
    max_running: int | None = None
    """Requests that run at once; more of them wait."""
    max_queue: int | None = None
    """Requests that wait; more of them are refused."""


@dataclass(slots=True)
class Tenant:
    """One tenant that has requests at hand."""

    limits: TenantLimits
    waiting: list[Request] = field(default_factory=list)
    """The most urgent one first, of equals the oldest."""
    num_running: int = 0
    used: float = 0.0
    """Rows computed for it, by weight; comparable between tenants, no absolute count."""

    @property
    def share(self) -> float:
        """Running requests by weight."""
        return self.num_running / self.limits.weight


class Tenants:
    """The waiting requests of all tenants, and who has had how much."""

    def __init__(
        self,
        limits: Mapping[str, TenantLimits] | None = None,
        default: TenantLimits | None = None,
    ) -> None:
        """`limits`: of tenants known by name; any other one has the `default`."""
        self._limits = dict(limits or {})
        self._default = default or TenantLimits()
        self._active: dict[str, Tenant] = {}

    def limits_of(self, name: str) -> TenantLimits:
        """What a tenant may hold."""
        return self._limits.get(name, self._default)

    def num_waiting(self, name: str) -> int:
        """Requests of one tenant that wait."""
        tenant = self._active.get(name)
        return len(tenant.waiting) if tenant else 0

    def __getitem__(self, name: str) -> Tenant:
        """A tenant; a new one begins level with those that are here, so that it neither pays for
        what they had nor has saved up for an idle time."""
        tenant = self._active.get(name)
        if tenant is None:
            least = min((t.used for t in self._active.values()), default=0.0)
            tenant = self._active[name] = Tenant(self.limits_of(name), used=least)
        return tenant

    def __iter__(self) -> Iterator[Request]:
        """Every waiting request, tenant by tenant."""
        for tenant in self._active.values():
            yield from tenant.waiting

    def put(self, request: Request) -> None:
        """Queues a request in its place."""
        insort(self[request.tenant].waiting, request, key=lambda r: r.rank)

    def next(self) -> Request | None:
        """The request whose turn it is, left in its queue; None where nobody may start one."""
        ready = [t for t in self._active.values() if t.waiting and _may_start(t)]
        if not ready:
            return None
        return min(ready, key=lambda t: (t.share, t.used, t.waiting[0].rank)).waiting[0]

    def start(self, request: Request) -> None:
        """A waiting request begins to run."""
        tenant = self[request.tenant]
        tenant.waiting.remove(request)
        tenant.num_running += 1

    def stop(self, request: Request) -> None:
        """A running request no longer runs."""
        self[request.tenant].num_running -= 1
        self._forget(request.tenant)

    def drop(self, request: Request) -> None:
        """A waiting request is gone."""
        self[request.tenant].waiting.remove(request)
        self._forget(request.tenant)

    def charge(self, request: Request, num_rows: int) -> None:
        """Counts rows computed for a running request."""
        tenant = self._active[request.tenant]
        tenant.used += num_rows / tenant.limits.weight

    def _forget(self, name: str) -> None:
        # Names come from clients, so those without a request must not pile up.
        tenant = self._active[name]
        if not tenant.waiting and not tenant.num_running:
            del self._active[name]

    def check(self, running: list[Request]) -> None:
        """Raises AssertionError when the books are wrong."""
        for name, tenant in self._active.items():
            assert tenant.num_running == sum(r.tenant == name for r in running), name
            assert tenant.waiting or tenant.num_running, f"{name} is empty"
            assert tenant.waiting == sorted(tenant.waiting, key=lambda r: r.rank), name
            assert all(r.tenant == name for r in tenant.waiting), name
        assert {r.tenant for r in running} <= set(self._active)


def _may_start(tenant: Tenant) -> bool:
    most = tenant.limits.max_running
    return most is None or tenant.num_running < most
