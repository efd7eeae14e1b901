//! The same rows, however they are computed.

use crate::decoder::{Decoder, Shape};
use crate::ways::{Continuation, Request, Rows, Way, different, requests, serve};
use crate::{Where, write};
use anyhow::{Context, ensure};
use baton_kernels::adapter::AdapterBounds;
use baton_kernels::cuda::check::{How, Target};
use baton_kernels::device::Bounds;
use baton_kernels::numerics::Half;
use serde_json::json;
use std::path::Path;
use std::process::Command;

/// Prompts on both sides of blocks of attention, of splits, and of the window.
const LENGTHS: [usize; 10] = [1, 17, 63, 64, 65, 130, 300, 511, 513, 700];

struct World {
    shape: Shape,
    requests: Vec<Request>,
    bounds: Bounds,
    /// Blocks of the smallest size that all requests need together.
    tokens: usize,
}

fn world(on: &Where) -> World {
    let (shape, count, lengths, outputs): (_, _, &[usize], _) = match (on.is_recorded(), on.quick) {
        (true, _) => (Shape::TINY, 8, &[1, 17, 66, 40], 5),
        (false, true) => (Shape::SMALL, 32, &LENGTHS, 10),
        // Over 10,000 rows.
        (false, false) => (Shape::SMALL, 256, &LENGTHS, 40),
    };
    let requests = requests(count, lengths, outputs, shape.vocab);
    let longest = lengths.iter().max().unwrap_or(&1) + outputs + 1;
    let adapters = AdapterBounds { slots_max: 0, rank_max: 0 };
    let bounds =
        Bounds { rows_max: 2048, logit_rows_max: 256, slots_max: count.min(256), positions_max: longest, adapters };
    let tokens = requests.iter().map(|request| (request.prompt.len() + outputs + 1).next_multiple_of(128)).sum();
    World { shape, requests, bounds, tokens }
}

impl World {
    fn decoder(&self, on: &Where, block: u32) -> anyhow::Result<(Target, Decoder)> {
        let target = Target::open(&on.under(Half::Bf16)?, How::Plain)?;
        let device = target.device()?;
        let decoder = Decoder::new(&*device, self.shape, block, self.tokens as u32 / block, self.bounds)?;
        Ok((target, decoder))
    }

    /// Each request by itself, one row at a time, kernel by kernel.
    fn alone(&self, decoder: &mut Decoder) -> anyhow::Result<Rows> {
        serve(decoder, &self.requests, &Vec::new(), Way::ALONE)
    }
}

fn ways(on: &Where) -> Vec<(String, Way)> {
    let graph = Way { batch: 8, chunk: 256, continuation: Continuation::Graph, preempt: None, warm: false };
    let mut ways = Vec::new();
    let batches: &[usize] = if on.is_recorded() { &[1, 3] } else { &[1, 2, 3, 8, 9, 16, 33, 64, 100, 128, 256] };
    ways.extend(batches.iter().map(|batch| (format!("batch {batch}"), Way { batch: *batch, ..graph })));
    let chunks: &[usize] = if on.is_recorded() { &[7, 64] } else { &[1, 7, 33, 64, 100, 2048] };
    ways.extend(chunks.iter().map(|chunk| (format!("chunk {chunk}"), Way { chunk: *chunk, ..graph })));
    let drafts = Way { continuation: Continuation::Drafts, chunk: usize::MAX, batch: 2, ..graph };
    ways.push(("decoded rows prefilled".into(), drafts));
    ways.push(("kernel by kernel".into(), Way { continuation: Continuation::Eager, ..graph }));
    ways.push(("warm prefix".into(), Way { warm: true, ..graph }));
    ways.push(("preempted".into(), Way { preempt: Some(if on.is_recorded() { 2 } else { 7 }), ..graph }));
    ways
}

fn digests(rows: &Rows) -> Vec<String> {
    let digest = |row: &_| {
        let text = format!("{row:?}");
        // FNV-1a: what differs by accident differs here.
        text.bytes().fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
    };
    rows.iter().flatten().map(|row| format!("{:016x}", digest(row))).collect()
}

pub(crate) fn run(on: &Where, out: &Path) -> anyhow::Result<()> {
    let world = world(on);
    let (target, mut decoder) = world.decoder(on, 32)?;
    let truth = world.alone(&mut decoder)?;
    let rows: usize = truth.iter().map(Vec::len).sum();
    let distinct: std::collections::BTreeSet<String> = digests(&truth).into_iter().collect();
    ensure!(
        distinct.len() > rows / 2,
        "only {} of {rows} rows differ from one another: nothing is compared",
        distinct.len()
    );
    let (mut failed, mut compared) = (Vec::new(), Vec::new());
    let mut note = |way: String, different: usize| {
        println!("invariance: {way}: {different} of {rows} rows differ");
        if different > 0 {
            failed.push(format!("{way}: {different} of {rows} rows differ"));
        }
        compared.push(json!({"way": way, "rows": rows, "different": different}));
    };
    for (name, way) in ways(on) {
        let got = serve(&mut decoder, &world.requests, &truth, way)?;
        note(name, different(&got, &truth));
    }
    drop(decoder);
    let graph = Way { batch: 16, chunk: 100, continuation: Continuation::Graph, preempt: None, warm: false };
    for block in [16, 64, 128] {
        let (_, mut decoder) = world.decoder(on, block)?;
        let got = serve(&mut decoder, &world.requests, &truth, graph)?;
        note(format!("blocks of {block}"), different(&got, &truth));
    }
    let (want, got) = (digests(&truth), restarted(on)?);
    ensure!(got.len() == want.len(), "another process has {} rows of {}", got.len(), want.len());
    note("restart".into(), got.iter().zip(&want).filter(|(got, want)| got != want).count());
    let outcome = json!({"gpu": target.gpu().name, "rows": rows, "ways": compared});
    write(on, out, "invariance", outcome, &failed)
}

/// What another process makes of the same requests.
fn restarted(on: &Where) -> anyhow::Result<Vec<String>> {
    let mut command = Command::new(std::env::current_exe()?);
    command.arg("alone").arg("--device").arg(&on.device).arg("--kernels").arg(&on.kernels);
    if on.quick {
        command.arg("--quick");
    }
    let said = command.output()?;
    ensure!(said.status.success(), "another process fails: {}", String::from_utf8_lossy(&said.stderr));
    Ok(String::from_utf8(said.stdout).context("digests")?.lines().map(str::to_owned).collect())
}

pub(crate) fn alone(on: &Where) -> anyhow::Result<()> {
    let world = world(on);
    let (_, mut decoder) = world.decoder(on, 32)?;
    digests(&world.alone(&mut decoder)?).iter().for_each(|digest| println!("{digest}"));
    Ok(())
}
