"""The store behind the API: policies, templates and groups, whose machines the world gives.

A holding of the world carries the path of its group. What the world does to it, its machines
suffer: they start, are told to stop, and are gone.
"""

import random
import string
from collections.abc import Callable, Collection
from dataclasses import replace

from ..holding import Holding, NotOffered, OverQuota, Stage
from ..tpu_api.cloud import Machines
from ..world import World
from .offers import machine_types
from .operations import Operation, Operations
from .refusals import OperationFailed, Refused, in_use, invalid, not_found
from .resources import MODELS, Group, Instance, Resource, check_group
from .showing import Moment, instance_path

_SYSTEM_EVENTS = {
    # https://cloud.google.com/compute/docs/logging/audit-logging (system events)
    "preempted": ("compute.instances.preempted", "Instance was preempted."),
    "maintenance": (
        "compute.instances.terminateOnHostMaintenance",
        "Instance was terminated on host maintenance.",
    ),
}
_HOST_ERROR = ("compute.instances.hostError", "Instance was stopped by a host error.")


class Cloud:
    """Everything that one project made.

    Args:
        world: Who has what to give.
        machines: Who runs the hosts; None: they are made up.
        bulk_models: Provisioning models that groups in bulk mode may have. Google's page names
            two of them in one stored version and all in another.
    """

    def __init__(
        self,
        world: World,
        machines: Machines | None = None,
        bulk_models: Collection[str] = MODELS,
    ) -> None:
        self.world = world
        self.operations = Operations(world.clock)
        self._machines, self._bulk_models = machines, bulk_models
        self._resources: dict[str, Resource] = {}
        self._requests: dict[tuple[str, str, str], Operation] = {}
        self._on_gone: dict[str, list[Callable[[], None]]] = {}
        self._numbers = random.Random(f"{world.seed}/numbers")
        self._made_up = 0
        world.watch(self._follow)

    # What owners ask.

    def once(
        self, method: str, path: str, request_id: str, begin: Callable[[], Operation]
    ) -> Operation:
        """Begin something, unless the same request has begun it before."""
        with self.world.lock:
            key = (method, path, request_id)
            if request_id and key in self._requests:
                return self._requests[key]
            begun = begin()
            if request_id:
                self._requests[key] = begun
            return begun

    def insert(self, resource: Resource, user: str) -> Operation:
        """Begin to make something.

        Raises:
            Refused: As the API refuses it.
        """
        if resource.path in self._resources:
            raise Refused(409, "alreadyExists", f"The resource '{resource.path}' already exists")
        if isinstance(resource, Group):
            check_group(resource, self._bulk_models)
            self._check_offer(resource)
        self._resources[resource.path] = resource
        begun = self.operations.begin("insert", resource.path, resource.number, user)

        def settle() -> None:
            with self.world.lock:
                failure = None
                if isinstance(resource, Group):
                    failure = self._fill(resource, resource.size)
                resource.is_ready = True
                if failure is not None:
                    del self._resources[resource.path]
                self.operations.end(begun, failure)

        self.world.clock.call_later(self.world.pace.decide_s, settle)
        return begun

    def delete(self, path: str, user: str) -> Operation:
        """Begin to remove something; a group goes with its machines, when they are gone."""
        found = self.get(path)
        if not found.is_ready:
            raise Refused(400, "resourceNotReady", f"The resource '{path}' is not ready")
        for group in self.groups():
            if found in (group.template, group.policy):
                kind = path.split("/")[-2]
                words = {"instanceTemplates": "instance_template"}.get(kind, "resource_policy")
                raise in_use(words, path, group.path)
        found.is_leaving = True
        begun = self.operations.begin("delete", path, found.number, user)

        def settle() -> None:
            with self.world.lock:
                self._resources.pop(path, None)
                self.operations.end(begun)

        self._when_empty(path, settle)
        return begun

    def host_keys(self) -> list[tuple[str, str]]:
        """Return the keys that every host has published."""
        return [] if self._machines is None else [self._machines.host_key]

    def resize(self, path: str, size: int, user: str) -> Operation:
        """Begin to change how many machines a group has: all of them, or none."""
        group = self.get_group(path)
        if group.is_bulk and 0 not in (size, group.size):
            raise invalid("size", size, "Bulk mode groups can only grow from target size 0.")
        begun = self.operations.begin(
            "compute.instanceGroupManagers.resize", path, group.number, user
        )

        def settle() -> None:
            with self.world.lock:
                group.size = 0
                self.operations.end(begun, self._fill(group, size))

        self._when_empty(path, settle)
        return begun

    def get(self, path: str) -> Resource:
        """Return a policy, a template or a group.

        Raises:
            Refused: There is none.
        """
        if (found := self._resources.get(path)) is None:
            raise not_found(path)
        return found

    def get_group(self, path: str) -> Group:
        """Return a group."""
        if not isinstance(found := self.get(path), Group):
            raise not_found(path)
        return found

    def inside(self, folder: str) -> list[Resource]:
        """Return everything whose path is in a folder, by name."""
        found = [one for one in self._resources.values() if one.path.rsplit("/", 1)[0] == folder]
        return sorted(found, key=lambda one: one.path)

    def everything(self) -> list[str]:
        """Return the paths of all there is."""
        with self.world.lock:
            return sorted(self._resources)

    def groups(self) -> list[Group]:
        """Return all groups, zone by zone."""
        found = [one for one in self._resources.values() if isinstance(one, Group)]
        return sorted(found, key=lambda one: one.path)

    def moment(self, group: Group) -> Moment:
        """Return a group with what the world gave it."""
        return Moment(group, self.world.get(group.path), self.world.clock.now(), self.world.pace)

    def new_number(self) -> int:
        """Return an id as the API gives them."""
        return self._numbers.randrange(10**17, 10**18)

    # What happens to groups.

    def preempt(
        self,
        name: str,
        *,
        node: int | None = None,
        worker: int | None = None,
        notice_s: float | None = None,
    ) -> bool:
        """Take machines away; tell whether there were any.

        Args:
            name: Of a group, or of the template that groups are made of.
            node: Which of the template's groups alone is struck.
            worker: Which machine of a group alone is taken.
            notice_s: How long its processes have after SIGTERM; None: the world's pace.
        """
        with self.world.lock:
            groups = self._called(name)
            taken = False
            for group in groups if node is None else groups[node : node + 1]:
                group.struck = None if worker is None else (worker,)
                taken |= self.world.preempt(group.path, notice_s=notice_s)
            return taken

    def full_name(self, name: str) -> str | None:
        """Return the path of a group, or of the first of a template."""
        return next((group.path for group in self._called(name)), None)

    def _called(self, name: str) -> list[Group]:
        return [one for one in self.groups() if name in (one.path, one.name, one.template.name)]

    def _when_empty(self, path: str, then: Callable[[], None]) -> None:
        """Release a group's machines, and go on once they are gone."""
        if self.world.get(path) is None:
            self.world.clock.call_later(self.world.pace.release_s, then)
            return
        self._on_gone.setdefault(path, []).append(then)
        self.world.release(path)

    def _check_offer(self, group: Group) -> None:
        zone = group.path.split("/")[3]
        set_apart = self.world.zones[zone].reservations
        if group.reservation is not None and group.reservation not in set_apart:
            raise invalid(
                "resource.reservationAffinity.values", group.reservation, "No such reservation."
            )
        if group.machine.name not in machine_types(self.world.zones[zone]):
            raise not_found(
                f"{'/'.join(group.path.split('/')[:4])}/machineTypes/{group.machine.name}"
            )

    def _fill(self, group: Group, size: int) -> OperationFailed | None:
        """Ask the world for a group's machines; return why an operation fails, where it does."""
        try:
            group.check_size(size)
        except OperationFailed as failure:
            return failure
        group.size, group.struck = size, None
        group.instances = [self._new_instance(group, worker) for worker in range(size)]
        if size:
            self._ask(group)
        return None

    def _new_instance(self, group: Group, worker: int) -> Instance:
        letters = random.Random(f"{self.world.seed}/{group.path}/{worker}")
        tail = "".join(letters.choices(string.ascii_lowercase + string.digits, k=4))
        base = group.body.get("baseInstanceName", group.name)
        return Instance(f"{base}-{tail}", self.new_number(), worker)

    def _ask(self, group: Group) -> None:
        group.over_quota = None
        wanted = Holding(
            name=group.path,
            zone=group.path.split("/")[3],
            kind=group.machine.generation,
            amount=group.machine.chips * group.size,
            spot=group.model == "SPOT",
            reservation=group.reservation,
        )
        try:
            self.world.ask(wanted)
        except OverQuota as error:
            group.over_quota = error
        except NotOffered as error:
            raise invalid("resource", group.path, str(error)) from error

    def _ask_again(self) -> None:
        """Let groups that had no quota try again, as they do for as long as they are there."""
        with self.world.lock:
            for group in self.groups():
                if group.over_quota is not None and not group.is_leaving:
                    self._ask(group)

    def _follow(self, held: Holding) -> None:
        """Let machines suffer what the world does to their holding."""
        group = self._resources.get(held.name)
        if not isinstance(group, Group):
            return
        if held.stage is Stage.STARTING:
            group.struck = None
            for instance in group.instances:
                instance.address = self._start(group, instance)
        elif held.stage is Stage.RUNNING:
            self._limit_run(group, held)
        elif held.stage is Stage.LEAVING:
            self._take(group, held)
        elif held.stage is Stage.LOST:
            self._stop(group, self._struck(group))
            if group.repairs:
                self.world.clock.call_later(0, lambda: self.world.requeue(group.path))
        elif held.stage in (Stage.WAITING, Stage.REFUSED, Stage.ENDING, Stage.GONE):
            self._stop(group, group.instances)
        if held.stage is Stage.GONE:
            for then in (*self._on_gone.pop(group.path, ()), self._ask_again):
                self.world.clock.call_later(0, then)

    def _take(self, group: Group, held: Holding) -> None:
        kind, message = _SYSTEM_EVENTS.get(held.reason, _HOST_ERROR)
        for instance in self._struck(group):
            path = instance_path(group, instance)
            self.operations.note(kind, path, instance.number, message)
            if self._machines is not None:
                self._machines.warn(instance.name)

    def _limit_run(self, group: Group, held: Holding) -> None:
        """End machines that run for a time that was agreed on."""
        limit = group.scheduling.get("maxRunDuration", {}).get("seconds")
        if limit is None:
            return

        def end() -> None:
            now_held = self.world.get(group.path)
            if now_held is not None and replace(now_held, maintenance=None) == held:
                self.world.preempt(group.path, reason="run duration")

        self.world.clock.call_later(float(limit), end)

    def _struck(self, group: Group) -> list[Instance]:
        return [
            one for one in group.instances if group.struck is None or one.worker in group.struck
        ]

    def _start(self, group: Group, instance: Instance) -> str:
        items = group.template.body["properties"].get("metadata", {}).get("items", [])
        keys = next((item["value"] for item in items if item["key"] == "ssh-keys"), "")
        if self._machines is not None:
            return self._machines.start(instance.name, keys, devices=group.machine.devices)
        self._made_up += 1
        return f"10.{self._made_up >> 16 & 255}.{self._made_up >> 8 & 255}.{self._made_up & 255}"

    def _stop(self, group: Group, instances: Collection[Instance]) -> None:
        for instance in instances:
            if instance.address and self._machines is not None:
                self._machines.stop(instance.name)
