"""An emulated Cloud TPU API: `google.cloud.tpu.v2` and v2alpha1 over gRPC, for Google's client."""
