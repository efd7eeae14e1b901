//! `make chaos`: the default model and a random one, each for half of the time, broken in every way of the matrix.
//!
//! It runs itself again inside namespaces of its own, which end with it, and so does everything in them. `BATON_CHAOS_SEED` gives a
//! schedule again; the first argument is the time in seconds. Where there may be no namespaces, a run of the whole time fails, unless
//! `BATON_CHAOS_LINKS=0` asks for one without faults of links.

use baton_tests::chaos::network::inside;
use baton_tests::chaos::{ActPlan, Plan, run};
use baton_tests::load::Case;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::Duration;

const SEED: &str = "BATON_CHAOS_SEED";
const LINKS: &str = "BATON_CHAOS_LINKS";
const SECONDS: u64 = 900;
/// The promised run's counts, which shorter runs do not reach.
const HITS_MIN: u64 = 10;
const REQUESTS_MIN: u64 = 2_000;
/// So much longer a run goes on at most, until each cell has its hits.
const LONGER_MAX: Duration = Duration::from_secs(900);

const DEFAULT: &str = "smollm2-135m-instruct";
/// For all that clients ask at once, and for two or three of the longest requests: then pools are full, sequences preempted, and KV
/// waits for room.
const ROOM: &str = "256MiB";
const LITTLE_ROOM: &str = "16MiB";

/// Tens of milliseconds for a short prompt, 16 KiB of KV a token.
const RANDOM: &str = "random:hidden=512,layers=8,heads=8,kv_heads=8,vocab=500,context=1024,seed=12";

fn main() -> anyhow::Result<ExitCode> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [seed, seconds, links, no_network] = &arguments[..] {
        let network = if no_network.is_empty() { Ok(()) } else { Err(no_network.clone()) };
        return inner(seed.parse()?, seconds.parse()?, links.parse()?, network);
    }
    let seconds = arguments.first().cloned().unwrap_or(SECONDS.to_string());
    let seed = std::env::var(SEED).unwrap_or_else(|_| rand::random::<u32>().to_string());
    println!("{SEED}={seed}");
    let me = std::env::current_exe()?;
    let links = !std::env::var(LINKS).is_ok_and(|links| links == "0");
    let inside = if links { inside() } else { Err(anyhow::anyhow!("{LINKS}=0")) };
    let (mut command, no_network) = match inside {
        Ok(mut command) => {
            command.arg(me);
            (command, String::new())
        }
        Err(why) => (Command::new(me), format!("{why:#}")),
    };
    // In its place, so that whoever ends this process ends all of it. Services refuse variables that they do not know.
    Err(command.args([seed, seconds, links.to_string(), no_network]).env_remove(SEED).env_remove(LINKS).exec().into())
}

/// The run, where it is to be.
fn inner(seed: u64, seconds: u64, links: bool, network: Result<(), String>) -> anyhow::Result<ExitCode> {
    tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(async {
        tokio::select! {
            result = play(seed, seconds, links, network) => result,
            interrupted = tokio::signal::ctrl_c() => interrupted.map(|()| ExitCode::from(130)).map_err(Into::into),
        }
    })
}

async fn play(seed: u64, seconds: u64, links: bool, network: Result<(), String>) -> anyhow::Result<ExitCode> {
    let folder = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../target/chaos"));
    if folder.exists() {
        std::fs::remove_dir_all(&folder)?;
    }
    std::fs::create_dir_all(&folder)?;
    let whole = seconds >= SECONDS;
    let time = Duration::from_secs(seconds) / 2;
    let plan = Plan {
        seed,
        acts: vec![
            ActPlan {
                model: DEFAULT.into(),
                cases: cases(1),
                clients: 8,
                transport: "tcp",
                kv_cache_bytes: ROOM,
                time,
            },
            ActPlan {
                model: RANDOM.into(),
                cases: cases(2),
                clients: 8,
                transport: "ucx",
                kv_cache_bytes: LITTLE_ROOM,
                time,
            },
        ],
        hits_min: if whole { HITS_MIN } else { 0 },
        longer_max: LONGER_MAX,
        links: whole && links,
        requests_min: if whole { REQUESTS_MIN } else { 0 },
        patience: 1,
        folder: folder.clone(),
    };
    let report = run(&plan, network).await?;
    println!("{report}");
    std::fs::write(folder.join("summary.json"), serde_json::to_string_pretty(&report)?)?;
    if !report.is_kept() {
        println!("{}", report.last_words(&folder));
        println!("promises were broken; the same schedule again: {SEED}={seed} make chaos");
        return Ok(ExitCode::FAILURE);
    }
    Ok(ExitCode::SUCCESS)
}

/// Short and long prompts and answers; these `scale` times as long, for a model that is faster.
fn cases(scale: u32) -> Vec<Case> {
    let case = |prompt, answer, drawn| Case::new(prompt, answer * scale, drawn);
    vec![
        case(20, 4, false),
        case(60, 16, true),
        case(120, 24, false),
        case(100, 32, true),
        case(30, 40, false),
        case(180, 12, true),
        case(240, 8, false),
        case(320, 6, true),
        // Several samples of one prompt, and prompts that begin alike.
        Case { samples: 3, ..case(100, 12, true) },
        Case { samples: 2, ..case(40, 8, false) },
        Case { shared: 96, ..case(140, 10, false) },
        Case { shared: 96, ..case(200, 8, true) },
    ]
}
