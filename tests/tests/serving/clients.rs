//! Real clients against the shipped binaries: OpenAI's Python client, LangChain, and a gRPC client that knows nothing but an address.

use baton_tests::processes::{Up, python_client};

#[test]
fn real_clients_get_answers() -> anyhow::Result<()> {
    let up = Up::start(&["--kv-cache-bytes=256MiB"])?;
    let (openai, grpc) = (up.openai()?, up.grpc()?);
    // Both, so that a failure of one does not hide the other's.
    let openai = python_client("openai_client.py", &[&openai]);
    let grpc = python_client("reflection_client.py", &[&grpc]);
    let schemas = python_client("schemas_client.py", &[&up.openai()?, "20"]);
    let langchain = python_client("langchain_client.py", &[&up.openai()?]);
    println!("{}{}{}{}", openai?, grpc?, schemas?, langchain?);
    up.stop()
}

#[test]
#[ignore = "takes two minutes"]
fn answers_of_300_schemas_are_valid() -> anyhow::Result<()> {
    let up = Up::start(&["--kv-cache-bytes=256MiB"])?;
    println!("{}", python_client("schemas_client.py", &[&up.openai()?, "300"])?);
    up.stop()
}
