//! Prompts of published chat templates are those of `transformers`, and answers with tools are the same whole and streamed, on a split
//! cluster for each template.

use anyhow::{Context, ensure};
use baton_tests::processes::{Up, further_client};

/// What `make further-clients` made of published templates.
const TEMPLATES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../target/clients/templates");
/// Fewer are not all of them.
const TEMPLATES_MIN: usize = 13;

#[test]
#[ignore = "needs `make further-clients`"]
fn published_templates_give_the_prompts_of_transformers_and_equal_answers() -> anyhow::Result<()> {
    let models = tempfile::tempdir()?;
    let path = models.path().to_str().context("a folder with a name in UTF-8")?;
    let names = further_client("guidellm", "template_folders.py", &[TEMPLATES, path])?;
    let names: Vec<&str> = names.lines().collect();
    ensure!(names.len() >= TEMPLATES_MIN, "only {names:?}");
    // All of them, so that a failure of one does not hide the others'.
    let mut failures = Vec::new();
    for name in names {
        match checked(&format!("{path}/{name}")) {
            Ok(said) => print!("{said}"),
            Err(error) => failures.push(format!("{error:#}")),
        }
    }
    ensure!(failures.is_empty(), "{}", failures.join("\n"));
    Ok(())
}

/// Compares prompts and answers of a cluster with this model.
fn checked(model: &str) -> anyhow::Result<String> {
    let up = Up::start(&["--kv-cache-bytes=64MiB", "--model", model])?;
    let said = further_client("guidellm", "template_client.py", &[&up.openai()?, model])?;
    up.stop()?;
    Ok(said)
}
