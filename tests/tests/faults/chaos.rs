//! A short form of `make chaos`, and the table that it works through. See `baton_tests::chaos`.

use anyhow::{Context, ensure};
use baton_skips::{Need, skipped};
use baton_tests::chaos::matrix::rendered;
use baton_tests::chaos::network::{LinkFault, Net, Network, Way, address, enter, inside};
use baton_tests::chaos::relay::Impairment;
use baton_tests::chaos::report::Report;
use baton_tests::chaos::{ActPlan, Plan, run};
use baton_tests::load::Case;
use expect_test::expect_file;
use serde_json::Value;
use std::process::Command;
use std::time::{Duration, Instant};

const MODEL: &str = "random:hidden=256,layers=4,heads=4,kv_heads=2,vocab=500,context=1024,seed=13";
/// Fixed, so that every `make test` tries the same.
const SEED: u64 = 5;
/// Every promise must be kept here, however busy the machine is; how soon is measured by `make chaos`.
const PATIENCE: u32 = 8;
/// Where the table stands in the documentation.
const SECTION: (&str, &str) = ("<!-- The matrix, from tests/src/chaos/matrix.rs -->\n", "<!-- End of the matrix -->\n");

#[tokio::test(flavor = "multi_thread")]
async fn processes_fail_and_no_promise_is_broken() -> anyhow::Result<()> {
    let case = Case::new;
    let cases = vec![
        case(400, 20, false),
        Case { samples: 3, ..case(20, 30, true) },
        case(300, 250, true),
        case(40, 400, false),
        Case { shared: 96, ..case(200, 12, true) },
        Case { shared: 96, ..case(120, 8, false) },
    ];
    let folder = tempfile::tempdir()?;
    let plan = Plan {
        seed: SEED,
        acts: [("tcp", 30), ("ucx", 20)].map(|(transport, seconds)| act(&cases, transport, seconds)).to_vec(),
        hits_min: 0,
        longer_max: Duration::ZERO,
        links: false,
        requests_min: 100,
        patience: PATIENCE,
        folder: folder.path().to_path_buf(),
    };
    let report = run(&plan, Err("the short form runs anywhere".into())).await?;
    println!("{report}");
    ensure!(report.is_kept(), "{report}\n{}", report.last_words(folder.path()));
    Ok(())
}

fn act(cases: &[Case], transport: &'static str, seconds: u64) -> ActPlan {
    let (cases, time) = (cases.to_vec(), Duration::from_secs(seconds));
    ActPlan { model: MODEL.into(), cases, clients: 6, transport, kv_cache_bytes: "64MiB", time }
}

/// Answers every connection with all that it sent, once it has sent all.
const ECHO: &str = "
import socket
server = socket.create_server(('', 7))
while True:
    peer, _ = server.accept()
    data = bytearray()
    while chunk := peer.recv(1 << 16):
        data += chunk
    peer.sendall(data)
    peer.close()
";
/// Sends so many bytes to a host within so many seconds, and prints how many milliseconds it took until all were back.
const ASK: &str = "
import socket, sys, time
host, size, timeout = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
start = time.monotonic()
peer = socket.create_connection((host, 7), timeout)
peer.settimeout(timeout)
peer.sendall(bytes(size))
peer.shutdown(socket.SHUT_WR)
back = 0
while chunk := peer.recv(1 << 16):
    back += len(chunk)
assert back == size
print(int((time.monotonic() - start) * 1000))
";

/// The same, and whether the bytes came back as they were.
const COMPARE: &str = "
import socket, sys
host, size, timeout = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
peer = socket.create_connection((host, 7), timeout)
peer.settimeout(timeout)
peer.sendall(bytes(size))
peer.shutdown(socket.SHUT_WR)
back = bytearray()
while chunk := peer.recv(1 << 16):
    back += chunk
print('whole' if back == bytes(size) else 'damaged')
";

/// Runs [`links_fail_as_they_are_told`] where it may change the network.
#[test]
fn links_fail_in_namespaces_of_their_own() -> anyhow::Result<()> {
    let mut command = match inside() {
        Ok(command) => command,
        Err(why) => {
            skipped(Need::Namespaces, "how links fail", format!("{why:#}"));
            return Ok(());
        }
    };
    let me = command.arg(std::env::current_exe()?).args(["--ignored", "--exact", "chaos::links_fail_as_they_are_told"]);
    let output = me.output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    ensure!(output.status.success() && text.contains("1 passed"), "{text}{}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "links_fail_in_namespaces_of_their_own runs it"]
async fn links_fail_as_they_are_told() -> anyhow::Result<()> {
    if std::process::id() != 1 {
        skipped(Need::Namespaces, "how links fail", "links_fail_in_namespaces_of_their_own makes them");
        return Ok(());
    }
    let hosts = ["a", "b"].map(str::to_owned);
    let network = Network::start(&hosts, SEED).await?;
    let python = |host: &str, script: &str| {
        let words = enter(host);
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).args(["python3", "-c", script]);
        command
    };
    let mut server = python("b", ECHO).spawn()?;
    let target = address(Net::Data, 1);
    let ask = |bytes: u32, seconds: f64| -> anyhow::Result<Option<u64>> {
        let output = python("a", ASK).args([&target, &bytes.to_string(), &seconds.to_string()]).output()?;
        Ok(String::from_utf8(output.stdout)?.trim().parse().ok())
    };
    let deadline = Instant::now() + Duration::from_secs(60);
    while ask(10, 5.0)?.is_none() {
        ensure!(Instant::now() < deadline, "nobody answers through an unharmed link");
    }
    let slow = Impairment { delay: Duration::from_millis(150), ..Impairment::default() };
    // What is wrong with b's link, bytes to carry, and the least time that it must take.
    let delayed = (LinkFault::Relayed(slow), 10, 600);
    let narrowed = (LinkFault::Narrowed("8mbit"), 1_000_000, 1_500);
    for (link_fault, bytes, ms_min) in [delayed, narrowed] {
        network.impair(Net::Data, (1, "b"), link_fault)?;
        let took = ask(bytes, 60.0)?.with_context(|| format!("{link_fault:?}: nothing comes through"))?;
        ensure!(took >= ms_min, "{link_fault:?}: {bytes} bytes there and back in {took} ms");
        network.heal(Net::Data, (1, "b"), link_fault)?;
    }
    for link_fault in [LinkFault::Cut, LinkFault::Relayed(Impairment { loss: 1.0, ..Impairment::default() })] {
        network.impair(Net::Data, (1, "b"), link_fault)?;
        ensure!(ask(10, 0.5)?.is_none(), "{link_fault:?}: an answer came");
        network.heal(Net::Data, (1, "b"), link_fault)?;
        ensure!(ask(10, 60.0)?.is_some(), "{link_fault:?}: no answer after it was healed");
    }
    for way in [Way::To, Way::From] {
        network.impair(Net::Data, (1, "b"), LinkFault::OneWay(way))?;
        ensure!(ask(10, 0.5)?.is_none(), "{way:?}: an answer came");
        network.heal(Net::Data, (1, "b"), LinkFault::OneWay(way))?;
        ensure!(ask(10, 60.0)?.is_some(), "{way:?}: no answer after it was healed");
    }
    // Only the bytes tell: what is damaged comes, in full length.
    let damaged = LinkFault::Relayed(Impairment { damage: 0.2, ..Impairment::default() });
    network.impair(Net::Data, (1, "b"), damaged)?;
    ensure!(ask(300_000, 60.0)?.is_some(), "damaged packets come through");
    let same = python("a", COMPARE).args([&target, "300000", "60"]).output()?;
    ensure!(String::from_utf8(same.stdout)?.trim() == "damaged", "every byte came back as it was");
    network.heal(Net::Data, (1, "b"), damaged)?;
    let same = python("a", COMPARE).args([&target, "300000", "60"]).output()?;
    ensure!(String::from_utf8(same.stdout)?.trim() == "whole", "a healed link damages");
    network.impair(Net::Data, (1, "b"), LinkFault::Relayed(Impairment { loss: 0.03, ..Impairment::default() }))?;
    ensure!(ask(300_000, 60.0)?.is_some(), "some packets come through");
    server.kill()?;
    server.wait()?;
    Ok(())
}

/// Puts `text` in the place of what stands between two lines.
fn replaced(page: &str, (begin, end): (&str, &str), text: &str) -> anyhow::Result<String> {
    let (before, rest) = page.split_once(begin).with_context(|| format!("no {begin}"))?;
    let (_, after) = rest.split_once(end).with_context(|| format!("no {end}"))?;
    Ok(format!("{before}{begin}\n{text}\n{end}{after}"))
}

/// What the page says of a record.
fn told(name: &str, record: Option<&str>) -> anyhow::Result<String> {
    let Some(record) = record else { return Ok("No run of this code is recorded yet.\n".into()) };
    if name == "chaos" {
        return Ok(serde_json::from_str::<Report>(record)?.to_string());
    }
    let record: Value = serde_json::from_str(record)?;
    let text = |key: &str| record[key].as_str().with_context(|| format!("{name} has no {key}"));
    Ok(format!(
        "Recorded at commit {} ([{name}.json](recorded/{name}.json)): `{}`\n",
        text("commit")?,
        text("command")?
    ))
}

/// `UPDATE_EXPECT=1 cargo test --release -p baton-tests --test faults page` writes it anew.
#[test]
fn the_page_has_the_table_and_what_was_recorded() -> anyhow::Result<()> {
    const DOCS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs");
    let page = std::fs::read_to_string(format!("{DOCS}/reliability.md"))?;
    let mut right = replaced(&page, SECTION, &rendered())?;
    for name in ["chaos", "etcd", "drains", "overload", "connections", "simulation"] {
        let record = std::fs::read_to_string(format!("{DOCS}/recorded/{name}.json")).ok();
        let (begin, end) = (format!("<!-- Recorded: {name} -->\n"), format!("<!-- End of {name} -->\n"));
        right = replaced(&right, (&begin, &end), &told(name, record.as_deref())?)?;
    }
    expect_file!["../../../docs/reliability.md"].assert_eq(&right);
    Ok(())
}
