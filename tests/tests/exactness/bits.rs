//! The promise of bits, over the whole path: whatever is batched, chunked, shipped, preempted, continued or late, each step's logits and
//! every token's KV are those of a request that runs alone.

use baton_kernels::cpu::SimdLevel;
use baton_kernels::numerics::{Half, Numerics, TensorCore};
use baton_tests::bits::{Case, Coverage, Dealer, Family, Read, Route, Truth, World};
use baton_worker::settings::ModelSettings;

/// On both sides of every boundary of blocks and slabs; five reach into a third slab of 64 tokens.
const LENGTHS: [usize; 16] = [150, 1, 130, 62, 16, 63, 129, 15, 64, 127, 5, 17, 126, 40, 65, 33];

/// A request of [`LENGTHS`] that draws its tokens and ends inside a block, and how many samples of it come besides.
const SAMPLED: (usize, u32) = (2, 2);

/// Instructions that compute a long case within the time of a test.
const FAST: &[SimdLevel] =
    &[SimdLevel::Avx2Fma, SimdLevel::Avx512, SimdLevel::Avx512Vnni, SimdLevel::Avx512Bf16, SimdLevel::Amx];

/// Most tokens that a request generates.
const OUTPUTS: u32 = 14;

/// Runs `cases` cases for each of `models` models. Panics at the first difference, naming the case.
fn check(seed: u64, models: u64, cases: usize) -> Coverage {
    let (mut coverage, mut dealer) = (Coverage::default(), Dealer::new(seed).with_instructions(FAST));
    for model in 0..models {
        // Even seeds have partitions of K, which only f32fma knows.
        let class = match (seed + model) % 8 {
            1 => Numerics::Bf16x32,
            3 | 7 => Numerics::I8x32,
            5 => TENSOR_CORE,
            _ => Numerics::default(),
        };
        let world = World::random(Family::Cpu, class, seed + model, 2, &LENGTHS, OUTPUTS).unwrap();
        let truth = Truth::compute(world.with_samples(SAMPLED.0, SAMPLED.1)).unwrap();
        let sizes = truth.sizes();
        // Both routes with both sizes of blocks, over two models.
        let routes = if model % 2 == 0 { [Route::Local, Route::Remote] } else { [Route::Remote, Route::Local] };
        let made = [16, 64].into_iter().zip(routes).map(|(block, route)| Case::preempting(block, route, &sizes));
        let getting = Dealer::BLOCKS.map(|blocks| Case::getting(blocks, model % 2 == 1, Read::Undisturbed, &sizes));
        let evicted = Dealer::BLOCKS.map(|blocks| Case::getting(blocks, false, Read::Evicted, &sizes));
        let made = made.chain(getting).chain(evicted);
        let dealt = (0..cases).map(|_| dealer.deal(&sizes));
        coverage.merge(&equal(&truth, made.chain(dealt)));
    }
    println!("{coverage}");
    coverage
}

/// Compares what each case yields with the truth. Panics at the first difference, naming the case.
fn equal(truth: &Truth, cases: impl IntoIterator<Item = Case>) -> Coverage {
    let mut coverage = Coverage::default();
    for case in cases {
        let observed = truth.observe(&case).unwrap();
        let compared = observed.equal;
        let (class, model) = (truth.world().numerics, truth.world().model());
        let compared = compared.unwrap_or_else(|differ| panic!("{differ}\n{class}, model {model}\n{case:?}"));
        coverage.merge(&observed.coverage);
        coverage.add("equal", "rows of logits", compared.rows);
        coverage.add("equal", "KV of a layer and token at a step", compared.kv);
    }
    coverage
}

const ROUTES: [&str; 6] =
    ["Remote fresh", "Remote continued", "Got fresh", "Got continued", "Local fresh", "Local continued"];

/// What every run of cases must have come by.
fn wanted() -> Vec<(&'static str, &'static [&'static str])> {
    let chunks: &[&str] = &["1", "7", "33", "64", "100", "256"];
    vec![
        ("P block", &["16", "64"]),
        ("D block", &["16", "64"]),
        ("P and D blocks", &["same", "different"]),
        ("P chunk", chunks),
        ("D chunk", chunks),
        ("P threads", &["1", "2"]),
        ("D threads", &["1", "2"]),
        ("P backend", &["plain", "lagging"]),
        ("D backend", &["plain", "lagging"]),
        ("shipped over", &["ucx", "tcp"]),
        ("requests", &ROUTES),
        ("P caches", &["Off", "On", "Churned", "tokens found", "blocks evicted"]),
        ("D caches", &["Off", "On", "Churned", "tokens found", "blocks evicted"]),
        ("handoffs", &["tokens left out"]),
        ("gets", &["tokens", "of evicted blocks"]),
        ("arrivals", &["Together", "Staggered", "Gathered", "InTurn"]),
        ("D", &["calm", "preempting"]),
        ("D preempting, block", &["16 preempting", "64 preempting"]),
        ("D preempts", &["Remote", "Local"]),
        ("class", &["f32fma", "bf16x32", "i8x32"]),
        ("weights", &["F32", "Q4_0", "Q4_1", "Q8_0", "Q4K", "Q6K"]),
        ("attention output", &["4 partitions of 2 slabs"]),
        ("MLP down", &["4 partitions of 3 slabs"]),
        ("D widest step", &["1", "18"]),
        ("steps", &["of prefill and decode"]),
        ("chunks", &["that start inside a slab"]),
    ]
}

#[test]
fn every_way_to_serve_a_request_gives_the_bits_it_has_alone() {
    let coverage = check(1, 3, 12);
    assert_eq!(coverage.missing(&wanted()), []);
}

/// P and D compute with different instructions, each level of this machine once on either side: a short world, since plain Rust is slow.
#[test]
fn engines_with_different_instructions_hand_off_exactly() {
    for (seed, class) in [(2, Numerics::default()), (3, Numerics::Bf16x32), (4, Numerics::I8x32)] {
        let truth = Truth::compute(World::random(Family::Cpu, class, seed, 1, &[40, 17, 3], 4).unwrap()).unwrap();
        let (sizes, mut dealer) = (truth.sizes(), Dealer::new(seed).with_instructions(&SimdLevel::ALL));
        let coverage = equal(&truth, SimdLevel::ALL.map(|_| dealer.deal(&sizes)));
        println!("{coverage}");
        let levels = SimdLevel::ALL.into_iter().filter(|level| level.available());
        let levels: Vec<_> = levels.map(|level| format!("{level:?}")).collect();
        let levels: Vec<&str> = levels.iter().map(String::as_str).collect();
        let wanted: [(_, &[_]); 3] =
            [("P instructions", &levels), ("D instructions", &levels), ("P and D instructions", &["different"])];
        assert_eq!(coverage.missing(&wanted), []);
    }
}

/// Prompts of two and of three splits of attention, the last of each short.
const LONG: [usize; 2] = [530, 1040];

/// A case with chunks that begin at no multiple of a block of attention.
fn in_chunks(mut case: Case) -> Case {
    (case.p.chunk, case.d.chunk) = (100, 33);
    case
}

#[test]
fn prompts_of_several_splits_have_the_bits_they_have_alone() {
    for class in [Numerics::Bf16x32, Numerics::I8x32] {
        let long = |family| Truth::compute(World::long(family, class, 1, &LONG, 6).unwrap()).unwrap();
        let (truth, mut dealer) = (long(Family::Cpu), Dealer::new(1).with_instructions(&SimdLevel::ALL));
        let sizes = truth.sizes();
        let cases: Vec<_> = SimdLevel::ALL.iter().map(|_| in_chunks(dealer.deal(&sizes))).collect();
        let coverage = equal(&truth, cases.clone());
        println!("{coverage}");
        let wanted: [(_, &[_]); 4] = [
            ("P and D instructions", &["different"]),
            ("chunks", &["that start inside a slab", "behind a split"]),
            ("requests", &ROUTES),
            ("weights", &["Q4_0", "Q4_1", "Q8_0"]),
        ];
        assert_eq!(coverage.missing(&wanted), []);

        let mutant = long(Family::SplitStart);
        let caught = cases.iter().find_map(|case| mutant.observe(case).unwrap().equal.err());
        println!("{class}: {:?}, {}", Family::SplitStart, caught.expect("splits that depend on the chunk start pass"));
    }
}

#[test]
#[ignore = "make test-full: 160 cases over 8 models"]
fn many_more_ways_give_the_bits_a_request_has_alone() {
    let coverage = check(1000, 8, 20);
    assert_eq!(coverage.missing(&wanted()), []);
}

/// What the tensor cores of an H100 compute.
const TENSOR_CORE: Numerics = Numerics::TensorCore { cores: TensorCore::Tc16F25, half: Half::Bf16 };

/// Both workers on recorded GPUs, with handoffs between their memories: the bits of the same class on a CPU.
#[test]
fn recorded_gpus_have_the_bits_of_the_cpu() {
    let older = Numerics::TensorCore { cores: TensorCore::Tc8F24, half: Half::Bf16 };
    for class in [TENSOR_CORE, older] {
        assert_eq!(passes(Family::Recorded, class, 6), Ok(()), "{class}");
        // Steps of more than 128 rows, whose products a library computes.
        let world = World::random(Family::Recorded, class, 7, 2, &[131, 150], 3).unwrap();
        let truth = Truth::compute(world).unwrap();
        let together = Case::preempting(16, Route::Remote, &truth.sizes());
        truth.observe(&together).unwrap().equal.unwrap_or_else(|difference| panic!("{class}: {difference}"));
    }
}

/// Deals up to `cases` cases to backends of `family` and compares with what such a backend computes for each request alone: whether all
/// of them passed.
fn passes(family: Family, class: Numerics, cases: usize) -> Result<(), String> {
    // Two layers: the last layer attends only from rows whose logits are wanted, each by itself.
    let world = World::random(family, class, 7, 2, &[131, 3, 20, 64, 17], 6).unwrap();
    let truth = Truth::compute(world).unwrap();
    let (sizes, mut dealer) = (truth.sizes(), Dealer::new(7));
    for number in 1..=cases {
        let case = dealer.deal(&sizes);
        if let Err(difference) = truth.observe(&case).unwrap().equal {
            return Err(format!("case {number}: {difference}"));
        }
    }
    Ok(())
}

#[test]
fn the_same_check_catches_each_mutant() {
    const CASES: usize = 4;
    for class in [Numerics::default(), Numerics::Bf16x32, Numerics::I8x32, TENSOR_CORE] {
        assert_eq!(passes(Family::Cpu, class, CASES), Ok(()), "{class}: the check fails for what is right");
        assert_eq!(passes(Family::Reference, class, CASES), Ok(()), "{class}: the check fails for the reference");
        for mutant in Family::MUTANTS {
            let caught = passes(mutant, class, CASES).expect_err(&format!("{class}: {mutant:?} passes"));
            println!("{class}: {mutant:?}, {caught}");
        }
    }
}

/// A sliding window in every layer, or in some: blocks that left it go to other sequences, and only what the next position needs is handed
/// off.
#[test]
fn of_a_window_only_what_is_needed_is_held_and_moved() {
    let windowed = |window, class| World::windowed(Family::Cpu, class, 9, window, &LENGTHS, OUTPUTS).unwrap();
    let mixed = |window, class| {
        let world = World::mixed(Family::Cpu, class, 9, window, &LENGTHS, OUTPUTS).unwrap();
        world.with_samples(SAMPLED.0, SAMPLED.1)
    };
    let (f32fma, bf16x32, i8x32) = (Numerics::default(), Numerics::Bf16x32, Numerics::I8x32);
    let worlds = [
        (40, windowed(40, f32fma)),
        (70, windowed(70, bf16x32)),
        (1, mixed(40, f32fma)),
        (2, mixed(20, bf16x32)),
        (3, mixed(40, i8x32)),
    ];
    for (seed, world) in worlds {
        let truth = Truth::compute(world).unwrap();
        let (sizes, mut dealer) = (truth.sizes(), Dealer::new(seed));
        let routes = [Route::Local, Route::Remote];
        let made = [16, 64].into_iter().zip(routes).map(|(block, route)| Case::preempting(block, route, &sizes));
        let getting = Dealer::BLOCKS.map(|blocks| Case::getting(blocks, false, Read::Undisturbed, &sizes));
        let coverage = equal(&truth, made.chain(getting).chain((0..4).map(|_| dealer.deal(&sizes))));
        println!("{coverage}");
        assert_eq!(coverage.missing(&[("handoffs", &["without what left a window"])]), [], "{}", truth.world().model());
    }
}

/// Samples of one request at once: whoever computes the prompt first parts with it at its end, and the copy of its last block is needed.
#[test]
fn samples_part_with_a_copy_and_without_it_come_to_other_bits() {
    // Whether they come before the prompt is computed is up to threads: mostly.
    const TRIES: usize = 20;
    let world = World::random(Family::Cpu, Numerics::default(), 5, 2, &[100], 6).unwrap();
    let truth = Truth::compute(world.with_samples(0, 3)).unwrap();
    for (blocks, route) in Dealer::BLOCKS.into_iter().flat_map(|b| [(b, Route::Local), (b, Route::Remote)]) {
        let observe = |copies| truth.observe(&Case::sampling(blocks, route, copies, &truth.sizes()));
        let place = if route.is_shipped() { "P copies" } else { "D copies" };
        let copied = (0..TRIES).map(|_| observe(true).unwrap()).find(|copied| {
            assert!(copied.equal.is_ok(), "{blocks:?}, {route:?}: {:?}", copied.equal);
            copied.coverage.missing(&[(place, &["where samples part"])]).is_empty()
        });
        assert!(copied.is_some(), "{blocks:?}, {route:?}: no samples parted");
        // Memory was NaN before: sampling already may refuse it.
        let without = (0..TRIES).find_map(|_| match observe(false) {
            Ok(observed) => observed.equal.err().map(|difference| difference.to_string()),
            Err(error) => Some(error.root_cause().to_string()),
        });
        let without = without.expect("blocks were not copied, and the bits are right");
        assert!(without.contains("differs") || without.contains("NaN"), "{without}");
        println!("{blocks:?}, {route:?}, {without}");
    }
}

/// The cases of `getting`, with the guard of gets left out: they show what it is for.
#[test]
fn without_the_pin_evicted_blocks_come_to_other_bits() {
    let world = World::random(Family::Cpu, Numerics::default(), 1, 2, &[150], 4).unwrap();
    let truth = Truth::compute(world.with_samples(0, 1)).unwrap();
    for blocks in Dealer::BLOCKS {
        let case = |read| Case::getting(blocks, false, read, &truth.sizes());
        let guarded = truth.observe(&case(Read::Evicted)).unwrap();
        assert!(guarded.equal.is_ok(), "{blocks:?}: {:?}", guarded.equal);
        assert_eq!(
            guarded.coverage.missing(&[("gets", &["of evicted blocks"])]),
            [],
            "{blocks:?}: nothing was evicted"
        );
        let without = truth.observe(&case(Read::Unguarded)).unwrap();
        println!("{blocks:?}, {}", without.equal.expect_err("evicted blocks were read, and the bits are right"));
    }
}

/// What a reader was told of is evicted before it asks: whether all of it is there and holding it are one step.
#[test]
fn blocks_that_are_gone_when_they_are_asked_for_are_refused() {
    let world = World::random(Family::Cpu, Numerics::default(), 1, 2, &[150], 4).unwrap();
    let truth = Truth::compute(world.with_samples(0, 1)).unwrap();
    for blocks in Dealer::BLOCKS {
        let gone = truth.observe(&Case::getting(blocks, false, Read::Gone, &truth.sizes())).unwrap();
        assert!(gone.equal.is_ok(), "{blocks:?}: {:?}", gone.equal);
        assert_eq!(gone.coverage.missing(&[("gets", &["of blocks that were gone"])]), [], "{blocks:?}: it was served");
    }
}

#[test]
fn the_default_model_has_the_same_bits_in_every_way() {
    let golden = baton_tests::golden::all().unwrap();
    let source = baton_worker::models::open(&ModelSettings::default(), &|_, _| ()).expect("run `make model` first");
    let long: Vec<_> = golden.iter().flat_map(|g| g.prompt_ids.iter().chain(&g.out_ids).copied()).take(140).collect();
    let short = golden.iter().take(3).map(|g| g.prompt_ids.clone());
    let prompts: Vec<_> = short.chain([long]).collect();
    for class in [Numerics::Bf16x32, Numerics::I8x32] {
        default_model(World::new(Family::Cpu, class, source.clone(), prompts.clone(), 6));
    }
}

fn default_model(world: World) {
    // Three cases deal both transports, all arrivals (gathered, all four decode in one step), and 2 threads on D at least once.
    let (truth, mut dealer) = (Truth::compute(world).unwrap(), Dealer::new(3).with_instructions(FAST));
    let sizes = truth.sizes();
    let coverage = equal(&truth, (0..3).map(|_| dealer.deal(&sizes)));
    println!("{coverage}");
    let wanted: [(_, &[_]); 5] = [
        ("D widest step", &["4"]),
        ("D threads", &["2"]),
        ("shipped over", &["ucx", "tcp"]),
        ("requests", &["Remote fresh", "Remote continued", "Local fresh", "Local continued"]),
        ("arrivals", &["Together", "Staggered", "Gathered"]),
    ];
    assert_eq!(coverage.missing(&wanted), []);
}
