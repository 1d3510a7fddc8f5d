"""Messages of libtpu's runtime metrics service, described as data.

libtpu serves `tpu.monitoring.runtime.RuntimeMetricService` from the process that holds the chips.
Its messages are described here rather than imported from tpu-info: generated code registers itself
in protobuf's one pool of a process, where a second copy (tpu-info's own, or another tool's) aborts.
These live in a pool of their own. Only fields that are read are listed; protobuf skips the rest.
"""

import functools
from typing import Any

PACKAGE = "tpu.monitoring.runtime"
SERVICE = f"{PACKAGE}.RuntimeMetricService"
# Message -> field -> (number, type); "*" repeats, a capital letter names a message. Fields of one
# "oneof" carry its name after a slash.
MESSAGES: dict[str, dict[str, tuple[int, str]]] = {
    "Exponential": {
        "num_finite_buckets": (1, "int32"),
        "growth_factor": (2, "double"),
        "scale": (3, "double"),
    },
    "BucketOptions": {"exponential_buckets": (2, "Exponential/options")},
    "Distribution": {
        "count": (1, "int64"),
        "mean": (2, "double"),
        "min": (3, "double"),
        "max": (4, "double"),
        "bucket_options": (6, "BucketOptions"),
        "bucket_counts": (7, "int64*"),
    },
    "Gauge": {
        "as_double": (1, "double/value"),
        "as_int": (2, "int64/value"),
        "as_string": (3, "string/value"),
        "as_bool": (4, "bool/value"),
    },
    "AttrValue": {
        "string_attr": (1, "string/attr"),
        "int_attr": (3, "int64/attr"),
        "kvlist_attr": (6, "KeyValueList/attr"),
    },
    "KeyValueList": {"attributes": (1, "Attribute*")},
    "Attribute": {"key": (1, "string"), "value": (2, "AttrValue")},
    "Metric": {
        "attribute": (1, "Attribute"),
        "gauge": (3, "Gauge/measure"),
        "distribution": (5, "Distribution/measure"),
    },
    "TPUMetric": {
        "name": (1, "string"),
        "description": (2, "string"),
        "metrics": (3, "Metric*"),
    },
    "MetricRequest": {"metric_name": (1, "string"), "skip_node_aggregation": (2, "bool")},
    "MetricResponse": {"metric": (1, "TPUMetric")},
}


@functools.cache
def message_class(name: str) -> Any:
    """Return protobuf's class of a message."""
    from google.protobuf.message_factory import GetMessageClass

    return GetMessageClass(_pool().FindMessageTypeByName(f"{PACKAGE}.{name}"))


@functools.cache
def _pool() -> Any:
    from google.protobuf.descriptor_pb2 import FileDescriptorProto
    from google.protobuf.descriptor_pool import DescriptorPool

    file = FileDescriptorProto(name="tpukit/libtpu_metrics", package=PACKAGE, syntax="proto3")
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            _add_field(message, field, number, kind)
    pool = DescriptorPool()
    pool.Add(file)  # pyright: ignore[reportAttributeAccessIssue, reportDeprecated]  of the one in C
    return pool


def _add_field(message: Any, name: str, number: int, kind: str) -> None:
    from google.protobuf.descriptor_pb2 import FieldDescriptorProto as Field

    kind, _, choice = kind.partition("/")
    repeated = kind.endswith("*")
    kind = kind.removesuffix("*")
    field = message.field.add(name=name, number=number)
    field.label = Field.LABEL_REPEATED if repeated else Field.LABEL_OPTIONAL
    if kind[0].isupper():
        field.type, field.type_name = Field.TYPE_MESSAGE, f".{PACKAGE}.{kind}"
    else:
        field.type = Field.Type.Value(f"TYPE_{kind.upper()}")
    if choice:
        if not message.oneof_decl:
            message.oneof_decl.add(name=choice)
        field.oneof_index = 0
