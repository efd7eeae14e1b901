//! The chart as real Helm renders it.

use anyhow::{Context, ensure};
use serde_json::Value;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::{fs, str};

/// Releases of Kubernetes whose schemas every manifest is checked against.
pub(crate) const RELEASES: [&str; 3] = ["1.33", "1.35", "1.37"];
/// The namespace of all renderings.
pub(crate) const NAMESPACE: &str = "llm";

/// A file of this repository.
pub(crate) fn path(of: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(of)
}

/// Values files, by name, with which everything must hold.
pub(crate) fn cases() -> anyhow::Result<Vec<String>> {
    let files = fs::read_dir(path("deploy/helm/baton/ci"))?.map(|file| Ok(file?.path()));
    let files = files.collect::<anyhow::Result<Vec<_>>>()?;
    let name = |file: &PathBuf| Some(file.file_stem()?.to_str()?.to_owned());
    let mut names: Vec<String> = files.iter().filter_map(name).collect();
    names.sort();
    ensure!(names.len() >= 6, "the matrix of values lost cases: {names:?}");
    Ok(names)
}

/// Runs a tool that `make test` sets up.
pub(crate) fn tool(program: &str, arguments: &[&str], input: &str) -> anyhow::Result<Output> {
    let program = path(program);
    ensure!(program.exists(), "{} is missing: run `make clients charts` first, as `make test` does", program.display());
    let mut command = Command::new(&program);
    let piped = command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut process = piped.spawn().with_context(|| format!("cannot start {}", program.display()))?;
    let mut stdin = process.stdin.take().context("stdin is piped")?;
    let input = input.to_owned();
    let writer = std::thread::spawn(move || stdin.write_all(input.as_bytes()));
    let output = process.wait_with_output()?;
    // A tool that refuses early does not read on.
    let _ = writer.join();
    Ok(output)
}

/// What `helm install` tells people, with these values. Helm shows notes only where there is a cluster, so a copy of the chart renders
/// them into a manifest.
pub(crate) fn notes(values: &str) -> anyhow::Result<String> {
    let folder = tempfile::tempdir()?;
    let copied = Command::new("cp").arg("-r").arg(path("deploy/helm/baton")).arg(folder.path()).status()?;
    ensure!(copied.success(), "the chart cannot be copied");
    let chart = folder.path().join("baton");
    let shown = "notes: {{ include (print .Template.BasePath \"/NOTES.txt\") . | toJson }}\n";
    fs::write(chart.join("templates/shown.yaml"), shown)?;
    let chart = chart.display().to_string();
    let arguments =
        ["template", "baton", &chart, "--namespace", NAMESPACE, "--kube-version", "1.35.0", "--values", "-"];
    let arguments: Vec<&str> = arguments.into_iter().chain(["--show-only", "templates/shown.yaml"]).collect();
    let output = tool("target/helm/helm", &arguments, values)?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8_lossy(&output.stdout);
    let line = text.lines().find_map(|line| line.strip_prefix("notes: ")).context("no notes")?;
    Ok(serde_json::from_str(line)?)
}

/// Runs `helm {verb}` on the chart with the values of a case, or with those given; the error is what Helm said.
pub(crate) fn helm(verb: &[&str], case: Option<&str>, values: &str) -> anyhow::Result<Result<String, String>> {
    let chart = path("deploy/helm/baton").display().to_string();
    let file = case.map(|case| path(&format!("deploy/helm/baton/ci/{case}.yaml")).display().to_string());
    let mut arguments: Vec<&str> = verb.to_vec();
    arguments.extend([chart.as_str(), "--namespace", NAMESPACE, "--kube-version", "1.35.0"]);
    arguments.extend(["--values", file.as_deref().unwrap_or("-")]);
    let output = tool("target/helm/helm", &arguments, values)?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Ok(if output.status.success() {
        Ok(text(&output.stdout))
    } else {
        Err(text(&output.stdout) + &text(&output.stderr))
    })
}

/// What a case renders.
pub(crate) fn render(case: &str) -> anyhow::Result<String> {
    helm(&["template", "baton"], Some(case), "")?.map_err(|said| anyhow::anyhow!("{case}: {said}"))
}

pub(crate) fn render_values(values: &str) -> anyhow::Result<Result<String, String>> {
    helm(&["template", "baton"], None, values)
}

/// Manifests, checked against the schemas of [`RELEASES`].
pub(crate) fn checked(rendered: &str) -> anyhow::Result<Vec<Value>> {
    read(rendered, &RELEASES)
}

/// Manifests as they are.
pub(crate) fn manifests(rendered: &str) -> anyhow::Result<Vec<Value>> {
    read(rendered, &[])
}

fn read(rendered: &str, releases: &[&str]) -> anyhow::Result<Vec<Value>> {
    let script = path("tests/chart/manifests.py").display().to_string();
    let arguments: Vec<&str> = [script.as_str()].into_iter().chain(releases.iter().copied()).collect();
    let output = tool("target/python/bin/python", &arguments, rendered)?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// All manifests of a kind.
pub(crate) fn of_kind<'a>(manifests: &'a [Value], kind: &'a str) -> impl Iterator<Item = &'a Value> {
    manifests.iter().filter(move |m| m["kind"] == kind)
}

/// Name of a manifest.
pub(crate) fn name(manifest: &Value) -> &str {
    manifest["metadata"]["name"].as_str().unwrap_or_default()
}

/// Elements of a list; none where there is no list.
pub(crate) fn items(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

/// Containers of a pod's specification, those of its start first.
pub(crate) fn containers(pod: &Value) -> impl Iterator<Item = &Value> {
    items(&pod["initContainers"]).chain(items(&pod["containers"]))
}
