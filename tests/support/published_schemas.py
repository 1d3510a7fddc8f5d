"""Validates a pod's documents by the schemas that JobSet and Kubernetes publish."""

from functools import cache

from jsonschema.validators import Draft202012Validator
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet
from kubernetes_validate.utils import schema_contents
from referencing import Registry, Resource

VERSIONS = ("1.32", "1.33", "1.34", "1.35", "1.37")


@cache
def validator(schema, version):
    """Return the strict validator of a kind, as `kubernetes_validate.validate` makes one."""
    folder = f"kubernetes-json-schema/v{version}.0-local-strict"
    whole = schema_contents(f"{folder}/{schema}.json", version)
    definitions = schema_contents(f"{folder}/_definitions.json", version)
    registry = Resource.from_contents(definitions) @ (Resource.from_contents(whole) @ Registry())
    return Draft202012Validator(whole, registry=registry)


def assert_kept(given, read):
    """Compare a document with what a model read, which lacks unknown fields and has defaults."""
    if isinstance(given, dict):
        assert not given.keys() - read.keys(), "fields that the model does not have"
        for key, value in given.items():
            assert_kept(value, read[key])
    elif isinstance(given, list):
        assert len(given) == len(read)
        for one, other in zip(given, read, strict=True):
            assert_kept(one, other)
    else:
        assert given == read


def check(manifest, versions=VERSIONS):
    """Validate the documents of a manifest, without unknown fields."""
    jobset = manifest.jobset
    assert_kept(jobset, JobsetV1alpha2JobSet.from_dict(jobset).to_dict())
    (entry,) = jobset["spec"]["replicatedJobs"]
    for version in versions:
        job = {"apiVersion": "batch/v1", "kind": "Job", **entry["template"]}
        validator("job-batch-v1", version).validate(job)
        for document in (*manifest.documents, manifest.secret_document):
            if document is not None and document["apiVersion"] == "v1":
                validator(f"{document['kind'].lower()}-v1", version).validate(document)
