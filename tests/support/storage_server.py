"""Cloud Storage on loopback, by gcp-storage-emulator, in a process of its own.

Two documented parts of the API are missing in the emulator and added here around its handlers:
`ifGenerationMatch` of an upload (TensorStore and `RunLease` create objects under that condition),
and the header `x-goog-generation` of a download, which TensorStore sends back as that condition.
"""

import json
import subprocess
import sys
import threading
from contextlib import contextmanager
from http import HTTPStatus
from urllib.request import Request, urlopen

BUCKET = "bucket"
READ_ONLY = "read-only"
"""A bucket that refuses every upload, as one does without the permission."""


@contextmanager
def storage_server(*, has_conditions=True):
    """Serve an empty bucket; yields the environment variables that lead clients to it."""
    process = subprocess.Popen(
        [sys.executable, __file__, str(int(has_conditions))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        address = f"http://127.0.0.1:{int(process.stdout.readline())}"
        yield {
            "STORAGE_EMULATOR_HOST": address,
            "TENSORSTORE_GCS_HTTP_URL": address,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none",
            "GOOGLE_CLOUD_PROJECT": "none",
            "FSSPEC_GS_TOKEN": "anon",
            "FSSPEC_GCS_TOKEN": "anon",
            # Or gcsfs asks a service that is not here what kind of bucket it is.
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
            "no_proxy": "127.0.0.1",
        }
    finally:
        process.stdin.close()  # the server ends when its input does
        process.wait(30)
        process.stdout.close()


def _add_generations():
    from gcp_storage_emulator import server
    from gcp_storage_emulator.exceptions import NotFound
    from gcp_storage_emulator.handlers import objects

    one_at_a_time = threading.Lock()
    plain_download, plain_insert = objects.download, objects.insert

    def generation(storage, bucket, name):
        try:
            return str(storage.get_file_obj(bucket, name)["generation"])
        except NotFound:
            return "0"

    def download(request, response, storage, *rest, **named):
        where = storage, request.params["bucket_name"], request.params["object_id"]
        with one_at_a_time:
            plain_download(request, response, storage, *rest, **named)
            response["x-goog-generation"] = generation(*where)

    def insert(request, response, storage, *rest, **named):
        if request.params["bucket_name"] == READ_ONLY:
            response.status = HTTPStatus.FORBIDDEN
            return
        wanted = request.query.get("ifGenerationMatch")
        given = request.query.get("name")
        name = given[0] if given else request.data["meta"]["name"]
        with one_at_a_time:
            if wanted and wanted[0] != generation(storage, request.params["bucket_name"], name):
                response.status = HTTPStatus.PRECONDITION_FAILED
                return
            plain_insert(request, response, storage, *rest, **named)

    objects.download = download  # the handler of metadata calls it, too
    changed = {plain_download: download, plain_insert: insert}
    for _, methods in server.HANDLERS:
        for method, handler in methods.items():
            methods[method] = changed.get(handler, handler)


def _serve(has_conditions):
    from gcp_storage_emulator.server import create_server

    if has_conditions:
        _add_generations()
    server = create_server("127.0.0.1", 0, in_memory=True, default_bucket=BUCKET)
    server.start()
    made = json.dumps({"name": READ_ONLY}).encode()
    urlopen(
        Request(
            f"http://127.0.0.1:{server._api._httpd.server_port}/storage/v1/b?project=test",
            data=made,
            headers={"Content-Type": "application/json"},
        )
    ).close()
    sys.stdout.write(f"{server._api._httpd.server_port}\n")
    sys.stdout.flush()
    sys.stdin.read()
    server.stop()


if __name__ == "__main__":
    _serve(sys.argv[1] == "1")
