"""Operations: most calls only begin something, and tell by an operation how it goes."""

import threading
import uuid
from dataclasses import dataclass

from ..clock import Clock
from .refusals import Json, OperationFailed, not_found
from .times import written

SITE = "https://www.googleapis.com/compute/v1"
LONGEST_WAIT_S = 1.0
"""Of `wait`, which may return before an operation is done, and at the latest after 2 minutes."""
KEPT = 10_000


@dataclass
class Operation:
    """Something that was begun on a resource."""

    path: str
    kind: str
    target: str
    target_number: int
    user: str
    number: int
    begun_at: float
    ended_at: float | None = None
    failure: OperationFailed | None = None
    message: str = ""

    def to_body(self) -> Json:
        """Return it as the API shows it."""
        scope = self.path.rsplit("/operations/", 1)[0]
        body: Json = {
            "kind": "compute#operation",
            "id": str(self.number),
            "name": self.path.rsplit("/", 1)[1],
            "operationType": self.kind,
            "targetLink": f"{SITE}/{self.target}",
            "targetId": str(self.target_number),
            "status": "RUNNING" if self.ended_at is None else "DONE",
            "user": self.user,
            "progress": 0 if self.ended_at is None else 100,
            "insertTime": written(self.begun_at),
            "startTime": written(self.begun_at),
            "selfLink": f"{SITE}/{self.path}",
        }
        where = scope.split("/")[2]
        if where in ("zones", "regions"):
            body[where.removesuffix("s")] = f"{SITE}/{scope}"
        if self.ended_at is not None:
            body["endTime"] = written(self.ended_at)
        if self.message:
            body["statusMessage"] = self.message
        if self.failure is not None:
            body["error"] = {"errors": self.failure.errors}
            if self.failure.http is not None:
                status, words = self.failure.http
                body |= {"httpErrorStatusCode": status, "httpErrorMessage": words}
        return body


class Operations:
    """All operations, in the order they began."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._operations: dict[str, Operation] = {}
        self._changed = threading.Condition()

    def begin(self, kind: str, target: str, number: int, user: str) -> Operation:
        """Note something that was begun on a resource, in the zone or region it is in."""
        project, scope = target.split("/")[:2], target.split("/")[2:4]
        place = [*project, *(scope if scope[0] in ("zones", "regions") else ["global"])]
        now = self._clock.now()
        name = f"operation-{int(now * 1000)}-{uuid.uuid4().hex[:20]}"
        path = "/".join([*place, "operations", name])
        begun = Operation(path, kind, target, number, user, uuid.uuid4().int >> 65, now)
        with self._changed:
            self._operations[path] = begun
            while len(self._operations) > KEPT:
                del self._operations[next(iter(self._operations))]
        return begun

    def end(self, operation: Operation, failure: OperationFailed | None = None) -> None:
        """Note that something is over."""
        with self._changed:
            operation.failure = failure
            operation.ended_at = self._clock.now()
            self._changed.notify_all()

    def note(self, kind: str, target: str, number: int, message: str) -> None:
        """Note what Google did by itself, such as a preemption."""
        done = self.begin(kind, target, number, "system")
        done.message = message
        self.end(done)

    def get(self, path: str) -> Operation:
        """Return an operation.

        Raises:
            Refused: There is none.
        """
        found = self._operations.get(path)
        if found is None:
            raise not_found(path)
        return found

    def wait(self, path: str) -> Operation:
        """Return an operation once it is done, or after a while."""
        found = self.get(path)
        with self._changed:
            self._changed.wait_for(lambda: found.ended_at is not None, LONGEST_WAIT_S)
        return found

    def inside(self, scope: str) -> list[Operation]:
        """Return the operations of a zone, a region or `global`, newest first."""
        with self._changed:
            held = list(self._operations.values())
        return [one for one in reversed(held) if one.path.startswith(f"{scope}/operations/")]
