//! Real clients against the shipped binaries: OpenAI's Python client, and a gRPC client that knows nothing but an address.

use baton_tests::processes::{Up, python_client};

#[test]
fn real_clients_get_answers() -> anyhow::Result<()> {
    let up = Up::start(&["--kv-cache-bytes=256MiB"])?;
    let (openai, grpc) = (up.openai()?, up.grpc()?);
    // Both, so that a failure of one does not hide the other's.
    let openai = python_client("openai_client.py", &[&openai]);
    let grpc = python_client("reflection_client.py", &[&grpc]);
    println!("{}{}", openai?, grpc?);
    up.stop()
}
