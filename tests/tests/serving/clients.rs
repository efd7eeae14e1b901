//! Real clients against the shipped binaries: OpenAI's and Anthropic's Python clients, LangChain, LiteLLM,
//! Schemathesis, Triton's client, and a gRPC client that knows nothing but an address.

use baton_tests::processes::{Up, further_client, python_client};

#[test]
fn real_clients_get_answers() -> anyhow::Result<()> {
    let up = Up::start(&["--kv-cache-bytes=256MiB"])?;
    let (openai, grpc) = (up.openai()?, up.grpc()?);
    // All of them, so that a failure of one does not hide the others'.
    let openai = python_client("openai_client.py", &[&openai]);
    let cases = python_client("openai_cases.py", &[&up.openai()?]);
    let grpc = python_client("reflection_client.py", &[&grpc]);
    let responses = python_client("responses_client.py", &[&up.openai()?]);
    let anthropic = python_client("anthropic_client.py", &[&up.anthropic()?]);
    let schemas = python_client("schemas_client.py", &[&up.openai()?, "20"]);
    let langchain = python_client("langchain_client.py", &[&up.openai()?]);
    let litellm = python_client("litellm_client.py", &[&up.anthropic()?]);
    let triton = python_client("triton_client.py", &[&up.grpc()?]);
    let openapi = python_client("openapi_client.py", &[&up.anthropic()?, "20", "fuzzing"]);
    println!("{}{}{}{}{}{}", openai?, cases?, grpc?, responses?, anthropic?, schemas?);
    println!("{}{}{}{}", langchain?, litellm?, triton?, openapi?);
    up.stop()
}

#[test]
#[ignore = "takes two minutes"]
fn answers_of_300_schemas_are_valid() -> anyhow::Result<()> {
    let up = Up::start(&["--kv-cache-bytes=256MiB"])?;
    println!("{}", python_client("schemas_client.py", &[&up.openai()?, "300"])?);
    up.stop()
}

#[test]
#[ignore = "takes two minutes"]
fn answers_are_those_of_the_openapi_document() -> anyhow::Result<()> {
    let up = Up::start(&["--kv-cache-bytes=256MiB"])?;
    println!("{}", python_client("openapi_client.py", &[&up.anthropic()?, "100", "coverage,fuzzing"])?);
    up.stop()
}

#[test]
#[ignore = "needs `make further-clients`"]
fn load_generators_and_grpc_tools_get_answers() -> anyhow::Result<()> {
    let up = Up::start(&["--kv-cache-bytes=256MiB"])?;
    let tools = concat!(env!("CARGO_MANIFEST_DIR"), "/../target/clients/bin");
    let grpc = python_client("grpcurl_client.py", &[&up.grpc()?, tools]);
    let load = further_client("guidellm", "load_client.py", &[&up.anthropic()?]);
    let lm_eval = further_client("lm-eval", "lm_eval_client.py", &[&up.openai()?, "generate"]);
    println!("{}{}{}", grpc?, load?, lm_eval?);
    up.stop()
}

#[test]
#[ignore = "needs `make further-clients`"]
fn lm_eval_scores_continuations() -> anyhow::Result<()> {
    let up = Up::start(&["--kv-cache-bytes=256MiB"])?;
    println!("{}", further_client("lm-eval", "lm_eval_client.py", &[&up.openai()?, "loglikelihood"])?);
    up.stop()
}
