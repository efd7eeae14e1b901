//! What images and the compose file rely on: configurations that the binaries accept, `--fetch-only`, an end on SIGTERM as process 1.

use anyhow::{Context, ensure};
use baton_tests::processes::{END_MAX, binary, send};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

fn deploy(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy").join(file)
}

fn run(name: &str, flags: &[&str], variables: &[(String, String)]) -> anyhow::Result<Output> {
    let mut command = Command::new(binary(name)?);
    Ok(command.args(flags).envs(variables.iter().cloned()).stdin(Stdio::null()).output()?)
}

/// `${NAME:-value}` is the value; nothing else is substituted.
fn default_of(text: &str) -> &str {
    text.strip_prefix("${").and_then(|t| t.strip_suffix('}')).and_then(|t| t.split_once(":-")).map_or(text, |(_, v)| v)
}

/// `BATON_*` variables of the compose file from the line `from` to the line `to`, each a line of its own; not the file's, which has
/// another name here.
fn variables(compose: &str, from: &str, to: &str) -> anyhow::Result<Vec<(String, String)>> {
    let start = compose.find(from).with_context(|| format!("no {from:?}"))?;
    let end = compose[start..].find(to).with_context(|| format!("no {to:?}"))? + start;
    let set = compose[start..end].lines().filter_map(|line| line.trim().split_once(": "));
    let ours = set.filter(|(name, _)| name.starts_with("BATON_") && *name != "BATON_CONFIG");
    Ok(ours.map(|(name, value)| (name.to_owned(), default_of(value).to_owned())).collect())
}

#[test]
fn binaries_accept_the_configurations_of_the_compose_file() -> anyhow::Result<()> {
    let compose = std::fs::read_to_string(deploy("compose/compose.yaml"))?;
    let shared = variables(&compose, "x-worker-environment:", "services:")?;
    ensure!(shared.iter().any(|(name, _)| name == "BATON_MODEL__MODEL"), "{shared:?}");
    let of = |from, to| anyhow::Ok([shared.clone(), variables(&compose, from, to)?].concat());
    let cases = [
        ("baton-router", "router.toml", vec![], "router:50051"),
        ("baton-prefill-worker", "worker.toml", of("prefill-0:", "decode-0:\n")?, "prefill-0:50052"),
        ("baton-decode-worker", "worker.toml", of("  decode-0:\n", "etcd:\n")?, "decode-0:50052"),
    ];
    for (program, file, variables, advertised) in cases {
        let path = deploy("compose").join(file);
        let path = path.to_str().context("a path of text")?;
        let out = run(program, &["--dump-config", "--config", path], &variables)?;
        let (dump, why) = (String::from_utf8(out.stdout)?, String::from_utf8(out.stderr)?);
        ensure!(out.status.success(), "{program} refuses {file} with {variables:?}: {why}");
        ensure!(dump.contains(&format!("advertise = \"{advertised}\"")), "{program}: {dump}");
        ensure!(dump.contains("dir = \"/etc/baton/identity\""), "{program} proves nothing: {dump}");
        ensure!(dump.contains("backend = \"etcd\"") && dump.contains("https://etcd:2379"), "{program}: {dump}");
    }
    Ok(())
}

#[test]
fn fetch_only_ends_by_itself_and_says_what_is_missing() -> anyhow::Result<()> {
    for program in ["baton-prefill-worker", "baton-decode-worker"] {
        let there = run(program, &["--fetch-only", "--model=random:vocab=300"], &[])?;
        ensure!(there.status.success(), "{}", String::from_utf8_lossy(&there.stderr));
        let missing = run(program, &["--fetch-only", "--model=/no/such/model.gguf"], &[])?;
        let why = String::from_utf8(missing.stderr)?;
        ensure!(!missing.status.success() && why.contains("/no/such/model.gguf"), "{why}");
    }
    Ok(())
}

#[test]
fn check_only_says_what_a_worker_would_refuse() -> anyhow::Result<()> {
    for program in ["baton-prefill-worker", "baton-decode-worker"] {
        let of = |flag: &str| run(program, &["--check-only", "--model=random:vocab=300", flag], &[]);
        let good = of("--max-model-len=64")?;
        ensure!(good.status.success(), "{}", String::from_utf8_lossy(&good.stderr));
        for (flag, says) in [
            ("--max-model-len=1000000", "lower --max-model-len"),
            ("--kv-cache-bytes=15TiB", "lower --kv-cache-bytes"),
            ("--kv-cache-bytes=1KiB", "--kv-cache-bytes"),
        ] {
            let refused = of(flag)?;
            let why = String::from_utf8(refused.stderr)?;
            ensure!(!refused.status.success() && why.contains(says), "{program} {flag}: {why}");
        }
        // Decode workers alone have a draft model.
        let draft = of("--draft-model=random:layers=1,vocab=301")?;
        ensure!(draft.status.success() == (program == "baton-prefill-worker"), "{program}: {draft:?}");
        // Who started it is told once.
        let told = run(program, &["--check-only", "--announce", "--model=/no/such/model.gguf"], &[])?;
        let (said, why) = (String::from_utf8(told.stdout)?, String::from_utf8(told.stderr)?);
        ensure!(said.contains(r#""event":"refused""#) && said.contains("/no/such/model.gguf"), "{program}: {said}");
        ensure!(!why.contains("/no/such"), "{program}: {why}");
    }
    Ok(())
}

/// What `.dockerignore` leaves of the repository is a workspace that cargo reads.
#[test]
fn the_manifests_are_read_where_images_are_built() -> anyhow::Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let context = tempfile::tempdir()?;
    let ignored = std::fs::read_to_string(root.join(".dockerignore"))?;
    let kept: Vec<_> = ignored.lines().filter_map(|line| line.strip_prefix('!')).collect();
    for needed in ["Cargo.toml", "Cargo.lock", "tests/Cargo.toml"] {
        ensure!(kept.contains(&needed), "{needed} is not among {kept:?}");
    }
    for path in kept {
        let to = context.path().join(path);
        std::fs::create_dir_all(to.parent().context("a path below the folder")?)?;
        let copied =
            Command::new("cp").args(["--archive", "--no-target-directory"]).arg(root.join(path)).arg(to).status()?;
        ensure!(copied.success(), "{path} is not copied");
    }
    // Reads every manifest of the workspace and its targets. It compiles nothing, and needs no crate that was not downloaded.
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["metadata", "--no-deps", "--offline", "--format-version=1"]).current_dir(context.path());
    let read = cargo.stdin(Stdio::null()).output()?;
    ensure!(read.status.success(), "{}", String::from_utf8_lossy(&read.stderr));
    Ok(())
}

/// The first process of a PID namespace gets no signal that it does not handle, and nobody else is there to pass it on.
#[test]
fn binaries_end_on_sigterm_as_process_1() -> anyhow::Result<()> {
    let loads: &[&str] = &["--model=random:vocab=300,context=256", "--kv-cache-bytes=4MiB"];
    let cases = [
        (
            "baton-router",
            &["--grpc-listen=127.0.0.1:0", "--http-listen=127.0.0.1:0", "--cluster-listen=127.0.0.1:0"] as &[&str],
        ),
        ("baton-prefill-worker", loads),
        ("baton-decode-worker", loads),
    ];
    for (program, flags) in cases {
        let mut outer = Command::new("unshare")
            .args(["--user", "--map-root-user", "--pid", "--fork", "--kill-child"])
            .arg(binary(program)?)
            .args(flags)
            .args(["--announce", "--log=warn"])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .context("unshare of util-linux")?;
        let mut lines = std::io::BufRead::lines(std::io::BufReader::new(outer.stdout.take().context("its output")?));
        let listens = lines.find_map(|line| line.ok().filter(|line| line.contains("listening")));
        ensure!(listens.is_some(), "{program} does not listen: {:?}", outer.wait()?);
        let children = std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", outer.id()))?;
        send("TERM", children.trim().parse().context("one child")?)?;
        let (sent, mut ended) = (Instant::now(), None);
        while ended.is_none() && sent.elapsed() < END_MAX {
            std::thread::sleep(Duration::from_millis(20));
            ended = outer.try_wait()?;
        }
        if ended.is_none() {
            outer.kill()?;
        }
        ensure!(ended.is_some_and(|status| status.success()), "{program}: {ended:?} after {:?}", sent.elapsed());
    }
    Ok(())
}

#[test]
fn a_release_holds_its_binaries_and_their_checksums() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let root = deploy("..");
    let call = |program: &str, arguments: &[&str], at: &Path| -> anyhow::Result<String> {
        let out = Command::new(program).args(arguments).current_dir(at).output()?;
        ensure!(out.status.success(), "{program} {arguments:?}: {}", String::from_utf8_lossy(&out.stderr));
        Ok(String::from_utf8(out.stdout)?)
    };
    let built = binary("baton")?;
    let paths = [folder.path(), built.parent().context("a folder of binaries")?].map(Path::to_str);
    let [folder_text, built] = paths.map(|path| path.unwrap_or_default());
    let made = call("scripts/dist", &[folder_text, built], &root)?;
    let name = format!("baton-{}-{}-linux", env!("CARGO_PKG_VERSION"), std::env::consts::ARCH);
    ensure!(made.trim_end().ends_with(&format!("/{name}.tar.gz")), "{made}");
    call("sha256sum", &["--check", "SHA256SUMS"], folder.path())?;
    call("tar", &["-xzf", &format!("{name}.tar.gz")], folder.path())?;
    let unpacked = folder.path().join(&name);
    let checked = call("sha256sum", &["--check", "SHA256SUMS"], &unpacked)?;
    let kernels = KERNELS.map(|target| format!("bin/kernels/{target}.cubins"));
    let files = [
        "LICENSE",
        "README.md",
        "bin/baton",
        "bin/baton-router",
        "bin/baton-prefill-worker",
        "bin/baton-decode-worker",
    ];
    for file in files.into_iter().chain(kernels.each_ref().map(String::as_str)) {
        ensure!(checked.contains(&format!("{file}: OK")), "no {file}: {checked}");
    }
    ensure!(checked.lines().count() == files.len() + kernels.len(), "something else: {checked}");
    let told = call("./baton", &["--version"], &unpacked.join("bin"))?;
    ensure!(told.trim_end() == format!("baton {}", env!("CARGO_PKG_VERSION")), "{told}");
    // Each file names the digest of its sources, and the program knows that of its own.
    let doctor = || call("./baton", &["doctor"], &unpacked.join("bin"));
    let whole = format!("bin/kernels: {}", KERNELS.join(" "));
    let told = doctor()?;
    ensure!(told.lines().any(|line| line.starts_with("ok    gpu kernels") && line.ends_with(&whole)), "{told}");
    let file = unpacked.join(&kernels[0]);
    let mut bytes = std::fs::read(&file)?;
    let digest = b"\"digest\":\"";
    let at = bytes.windows(digest.len()).position(|part| part == digest).context("no digest")? + digest.len();
    bytes[at] = if bytes[at] == b'0' { b'1' } else { b'0' };
    std::fs::write(&file, bytes)?;
    let refused = format!("{:#}", doctor().err().context("kernels of another build pass")?);
    ensure!(refused.contains("1 of"), "{refused}");
    Ok(())
}

/// Targets of GPU kernels, in the order of `baton doctor`.
const KERNELS: [&str; 5] = ["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120"];

/// `build` with an engine that prints what it is asked for.
fn asked_for(variables: &[(&str, &str)], arguments: &[&str]) -> anyhow::Result<Vec<String>> {
    let mut command = Command::new(deploy("docker/build"));
    let command = command.args(arguments).env("ENGINE", "echo").env_remove("UCX_DIR").envs(variables.iter().copied());
    let out = command.stdin(Stdio::null()).output()?;
    ensure!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    Ok(String::from_utf8(out.stdout)?.lines().map(str::to_owned).collect())
}

#[test]
fn images_for_cuda_are_those_that_the_chart_names_with_a_suffix() -> anyhow::Result<()> {
    let targets = ["1.2.3", "prefill-worker", "prefill-worker-cuda", "decode-worker-cuda"];
    let [plain, prefill, decode] = <[String; 3]>::try_from(asked_for(&[], &targets)?)
        .map_err(|asked| anyhow::anyhow!("three images, and not {asked:?}"))?;
    ensure!(plain.contains("--tag baton-prefill-worker:1.2.3 ") && !plain.contains("UCX"), "{plain}");
    for (asked, target) in [(&prefill, "prefill-worker"), (&decode, "decode-worker")] {
        ensure!(asked.contains(&format!("--target {target}-cuda --tag baton-{target}:1.2.3-cuda ")), "{asked}");
        ensure!(
            asked.contains("UCX_PACKAGE=libucx-cu13==1.22.0 --hash=sha256:") && asked.contains("UCX_DIR=/opt/python/"),
            "{asked}"
        );
    }
    let own = asked_for(&[("UCX_DIR", "/opt/mine")], &targets)?;
    ensure!(own.iter().all(|asked| asked.contains("UCX_DIR=/opt/mine ") && !asked.contains("libucx")), "{own:?}");
    // What these targets copy is where their programs look.
    let file = std::fs::read_to_string(deploy("docker/Dockerfile"))?;
    ensure!(file.matches("COPY --from=build-kernels /out/ /").count() == 2, "{file}");
    ensure!(file.contains("cubins --out /out/usr/local/bin/kernels") && file.contains("ENTRYPOINT [\"/usr/local/bin/"));
    Ok(())
}
