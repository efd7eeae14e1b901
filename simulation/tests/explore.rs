use baton_simulation::{Counts, run};
use baton_types::defect::{self, Defect};
fn defect() -> Option<Defect> {
    let name = std::env::var("BATON_DEFECT").ok()?;
    use Defect::*;
    [ReleaseWithoutFence, OtherIncarnation, OlderIncarnation, DoubleFree, ViewGoesBack, UnverifiedKv, LateQuarantineBound, EndlessDoubt, PartialGrantOffByOne, ForkShares, EvictedPin, IndexKeepsTheDead, StarvingGrant]
        .into_iter().find(|d| format!("{d:?}") == name)
}
#[test]
#[ignore]
fn explore() {
    let given = std::env::var("BATON_SIMULATION_SEEDS").unwrap();
    let (from, to) = given.split_once("..").unwrap();
    let seeds = from.parse::<u64>().unwrap()..to.parse().unwrap();
    let next = std::sync::atomic::AtomicU64::new(seeds.start);
    let sum = std::sync::Mutex::new(Counts::default());
    std::thread::scope(|s| {
        for _ in 0..2 { s.spawn(|| {
            defect::seed(defect());
            loop {
                let seed = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                if seed >= seeds.end { break }
                eprintln!("begin {seed}"); match { let r = run(seed); eprintln!("end {seed}"); r } { Ok(ran) => sum.lock().unwrap().merge(&ran.counts), Err(b) => println!("{}", b.to_string().chars().take(3300).collect::<String>()) }
            }
        }); }
    });
    println!("{}", sum.into_inner().unwrap());
}
