//! Kernels and programs against host twins.

use crate::decoder::{Decoder, Shape};
use crate::ways::{Continuation, Way, requests, serve};
use crate::{Where, write};
use anyhow::{Context, ensure};
use baton_kernels::adapter::AdapterBounds;
use baton_kernels::cuda::check::{Compared, Extent, How, SeededDefect, Target};
use baton_kernels::device::{Bounds, Device as _};
use baton_kernels::numerics::Half;
use serde_json::json;
use std::collections::BTreeMap;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

/// Rounds of fresh inputs on a GPU: the twins take some seconds for one.
const ROUNDS: u64 = 6;

/// Sizes of blocks that a pool may have.
const BLOCKS: [u32; 4] = [16, 32, 64, 128];

const BOUNDS: Bounds = Bounds {
    // A draft's segment is a whole prompt.
    rows_max: 640,
    logit_rows_max: 16,
    slots_max: 8,
    positions_max: 640,
    adapters: AdapterBounds { slots_max: 0, rank_max: 0 },
};

/// All of it, in both formats. `whole`: in full size on a recorded GPU, too.
pub(crate) fn run(on: &Where, out: &Path, whole: bool) -> anyhow::Result<()> {
    let quick = on.quick || (on.is_recorded() && !whole);
    let seed = if on.is_recorded() { 1 } else { SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs() };
    let (mut found, mut failed) = (Vec::new(), Vec::new());
    let (mut launches, mut bytes, mut graphs) = (BTreeMap::<String, u64>::new(), 0, 0);
    let (mut gpu, mut kernels) = (String::new(), Vec::new());
    for half in [Half::Bf16, Half::F16] {
        let under = on.under(half)?;
        let mut take = |target: &Target, of: &str| -> anyhow::Result<()> {
            let compared = target.compared()?;
            found.extend(said(&compared).map(|said| format!("{half:?}, {of}: {said}")));
            compared.launches.into_iter().for_each(|(kernel, count)| *launches.entry(kernel).or_default() += count);
            bytes += compared.bytes;
            graphs += compared.graphs;
            Ok(())
        };
        // A failure of the engine may come of what is found: that is said first.
        let mut ended = |target: &Target, of: &str, outcome: anyhow::Result<()>| {
            let taken = take(target, of);
            failed.extend(taken.and(outcome).err().map(|error| format!("{half:?}, {of}: {error:#}")));
        };
        let target = Target::open(&under, How::Checked)?;
        gpu = target.gpu().name.clone();
        kernels = target.kernels(&on.kernels)?;
        ended(&target, "known answers", target.device().map(drop).map_err(Into::into));
        let extent = if quick { Extent::Small } else { Extent::Whole { rounds: ROUNDS } };
        ended(&target, "kernels", target.ops(seed, extent).map_err(Into::into));
        println!("correct: kernels in {half:?}");
        for (how, blocks) in [(How::CheckedApart, &BLOCKS[..2]), (How::Checked, &BLOCKS[2..])] {
            let target = Target::open(&under, how)?;
            let outcome = blocks.iter().try_for_each(|block| steps(&target, *block, quick));
            ended(&target, &format!("programs, {how:?}"), outcome);
        }
        println!("correct: programs in {half:?}");
    }
    // Known answers launch their own kernels.
    let is_missing = |kernel: &String| !kernel.starts_with("known_") && !launches.contains_key(kernel);
    let missing: Vec<String> = kernels.into_iter().filter(is_missing).collect();
    if !missing.is_empty() {
        failed.push(format!("kernels that were never run: {}", missing.join(", ")));
    }
    if !quick && !launches.keys().any(|what| what.starts_with("product by")) {
        failed.push("no product of a library was run: put libcublasLt.so.13 on the library path".to_owned());
    }
    found.extend(failed);
    let failed = found;
    let outcome = json!({"gpu": gpu, "seed": seed, "launches": launches, "bytes": bytes, "graphs": graphs});
    write(on, out, "correct", outcome, &failed)
}

/// Requests on a checked device: prompts in chunks, steps of both kinds, graphs, drafts, and what is preempted.
fn steps(target: &Target, block: u32, quick: bool) -> anyhow::Result<()> {
    let device = target.device()?;
    let (lengths, outputs): (&[usize], _) = if quick { (&[3, 70], 3) } else { (&[1, 17, 70, 130, 530], 6) };
    let blocks = (lengths.iter().map(|len| len + outputs + 1).max().unwrap_or(0).div_ceil(block as usize) + 1) * 8;
    let mut decoder = Decoder::new(&*device, Shape::TINY, block, blocks as u32, BOUNDS)?;
    let memory = device.memory().context("a GPU without memory")?;
    let told_free = memory.free + memory.weights + memory.pool + memory.workspace;
    ensure!(told_free <= memory.total, "memory that is in use is told as free: {memory:?}");
    let requests = requests(lengths.len(), lengths, outputs, Shape::TINY.vocab);
    let graph = Way { batch: 4, chunk: 48, continuation: Continuation::Graph, preempt: None, warm: false };
    let rows = serve(&mut decoder, &requests, &Vec::new(), graph)?;
    let drafts = Way { continuation: Continuation::Drafts, batch: 2, chunk: usize::MAX, ..graph };
    if !quick || block == BLOCKS[0] {
        serve(&mut decoder, &requests, &rows, drafts)?;
        serve(&mut decoder, &requests, &rows, Way { preempt: Some(2), ..graph })?;
    }
    Ok(())
}

/// What differs, in words.
fn said(compared: &Compared) -> impl Iterator<Item = String> + '_ {
    let more =
        (compared.found > compared.findings.len() as u64).then(|| format!("{} differences in all", compared.found));
    let each = compared.findings.iter().map(|finding| {
        let (what, memory, at, bytes) = (&finding.what, &finding.memory, finding.at, finding.bytes);
        format!(
            "{what}: {bytes} bytes of {memory} differ, from {at} on: {:02x?}, not {:02x?}",
            finding.got, finding.want
        )
    });
    each.chain(more)
}

/// Every kernel, and a program if asked for, without a check between: what a sanitizer watches.
pub(crate) fn small(on: &Where, program: bool) -> anyhow::Result<()> {
    for half in [Half::Bf16, Half::F16] {
        let target = Target::open(&on.under(half)?, How::Plain)?;
        target.ops(1, Extent::Small)?;
        if program {
            steps(&target, BLOCKS[0], true)?;
        }
    }
    println!("small: every kernel has run");
    Ok(())
}

/// Whether the check finds the defect that the kernels have.
pub(crate) fn seeded(on: &Where) -> anyhow::Result<()> {
    let defect = on.defect.context("--defect is missing")?;
    ensure!(defect != SeededDefect::Barrier, "a race detector finds a missing barrier: run `small` under it");
    let target = Target::open(&on.under(Half::Bf16)?, How::Checked)?;
    target.ops(1, Extent::Small)?;
    let compared = target.compared()?;
    ensure!(compared.found > 0, "the defect {defect} is not found");
    let other = compared.findings.iter().find(|finding| !finding.what.starts_with(defect.kernel()));
    ensure!(other.is_none(), "the defect {defect} is of {}, and found elsewhere: {other:?}", defect.kernel());
    println!("seeded: {defect} is found {} times", compared.found);
    Ok(())
}
