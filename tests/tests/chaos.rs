//! A short form of `make chaos`, and the table that it works through. See `baton_tests::chaos`.

use anyhow::{Context, ensure};
use baton_tests::chaos::matrix::rendered;
use baton_tests::chaos::network::{Ill, Net, Network, address, enter, inside};
use baton_tests::chaos::relay::Manner;
use baton_tests::chaos::{ActPlan, Plan, run};
use baton_tests::load::Case;
use expect_test::expect_file;
use std::process::Command;
use std::time::{Duration, Instant};

const MODEL: &str = "random:hidden=256,layers=4,heads=4,kv_heads=2,vocab=500,context=1024,seed=13";
/// Fixed, so that every `make test` tries the same.
const SEED: u64 = 5;
/// Where the table stands in the documentation.
const SECTION: (&str, &str) = ("<!-- The matrix, from tests/src/chaos/matrix.rs -->\n", "<!-- End of the matrix -->\n");

#[tokio::test(flavor = "multi_thread")]
async fn processes_fail_and_no_promise_is_broken() -> anyhow::Result<()> {
    let case = |prompt, answer, drawn| Case { prompt, answer, drawn };
    let cases = vec![case(400, 20, false), case(20, 30, true), case(300, 250, true), case(40, 400, false)];
    let folder = tempfile::tempdir()?;
    let plan = Plan {
        seed: SEED,
        acts: vec![ActPlan { model: MODEL.into(), cases, clients: 6, time: Duration::from_secs(40) }],
        hits_min: 0,
        longer_max: Duration::ZERO,
        links: false,
        requests_min: 100,
        folder: folder.path().to_path_buf(),
    };
    let report = run(&plan, Err("the short form runs anywhere".into())).await?;
    println!("{report}");
    ensure!(report.is_kept(), "{report}\n{}", report.last_words(folder.path()));
    Ok(())
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

/// Runs [`links_fail_as_they_are_told`] where it may change the network.
#[test]
fn links_fail_in_namespaces_of_their_own() -> anyhow::Result<()> {
    let mut command = match inside() {
        Ok(command) => command,
        Err(why) => {
            println!("skipped, since there may be no network of its own here: {why:#}");
            return Ok(());
        }
    };
    let me = command.arg(std::env::current_exe()?).args(["--ignored", "--exact", "links_fail_as_they_are_told"]);
    let output = me.output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    ensure!(output.status.success() && text.contains("1 passed"), "{text}{}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "links_fail_in_namespaces_of_their_own runs it"]
async fn links_fail_as_they_are_told() -> anyhow::Result<()> {
    if std::process::id() != 1 {
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
    let deadline = Instant::now() + Duration::from_secs(20);
    while ask(10, 5.0)?.is_none() {
        ensure!(Instant::now() < deadline, "nobody answers through an unharmed link");
    }
    let slow = Manner { delay: Duration::from_millis(150), loss: 0.0 };
    // What is wrong with b's link, bytes to carry, and the least time that it must take.
    let delayed = (Ill::Relayed(slow), 10, 600);
    let narrowed = (Ill::Narrowed("8mbit"), 1_000_000, 1_500);
    for (ill, bytes, ms_min) in [delayed, narrowed] {
        network.harm(Net::Data, (1, "b"), ill)?;
        let took = ask(bytes, 20.0)?.with_context(|| format!("{ill:?}: nothing comes through"))?;
        ensure!(took >= ms_min, "{ill:?}: {bytes} bytes there and back in {took} ms");
        network.heal(Net::Data, (1, "b"), ill)?;
    }
    for ill in [Ill::Cut, Ill::Relayed(Manner { loss: 1.0, ..Manner::default() })] {
        network.harm(Net::Data, (1, "b"), ill)?;
        ensure!(ask(10, 0.5)?.is_none(), "{ill:?}: an answer came");
        network.heal(Net::Data, (1, "b"), ill)?;
        ensure!(ask(10, 20.0)?.is_some(), "{ill:?}: no answer after it was healed");
    }
    network.harm(Net::Data, (1, "b"), Ill::Relayed(Manner { loss: 0.03, ..Manner::default() }))?;
    ensure!(ask(300_000, 60.0)?.is_some(), "some packets come through");
    server.kill()?;
    server.wait()?;
    Ok(())
}

/// `UPDATE_EXPECT=1 cargo test --release -p baton-tests --test chaos` writes it anew.
#[test]
fn the_documentation_has_the_table() -> anyhow::Result<()> {
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/reliability.md"))?;
    let (before, rest) = page.split_once(SECTION.0).context("where the matrix begins")?;
    let (_, after) = rest.split_once(SECTION.1).context("where the matrix ends")?;
    let right = format!("{before}{}\n{}\n{}{after}", SECTION.0, rendered(), SECTION.1);
    expect_file!["../../docs/reliability.md"].assert_eq(&right);
    Ok(())
}
