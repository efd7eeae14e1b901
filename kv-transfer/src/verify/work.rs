//! The jobs of a verifier: sums and comparisons.

use crate::checksum::{GRANULE, SumError, Summer};
use crate::heads::Heads;
use crate::message::SumRun;
use baton_types::{BlockTables, GroupKind, KvPoolMap, seeded};
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
    /// The memory's device did not compute the sums, so nothing was compared.
    Failed(SumError),
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
    Check {
        tokens: u32,
        blocks: Arc<BlockTables>,
        heads: Arc<Heads>,
        runs: Vec<SumRun>,
        /// A guard that a test leaves out: what a NIC stored may not be visible yet.
        unseen: bool,
    },
}

impl Work {
    pub(super) fn run(self, summer: &Summer<'_>, map: &KvPoolMap) -> Verified {
        match self {
            Self::Sum { epoch, group, layer, tokens, blocks, heads, hold } => {
                let first_granule = tokens.start / GRANULE;
                let sums = summer.layer(map, &blocks.0[group], &heads, group, layer, tokens);
                drop(hold);
                let run = |sums| SumRun { group: group as u8, layer: layer as u16, first_granule, sums };
                match sums {
                    Ok(sums) => Verified::Summed { epoch, run: run(sums) },
                    Err(error) => Verified::Failed(error),
                }
            }
            Self::Check { tokens, blocks, heads, runs, unseen } => {
                // Every write behind these checksums has ended at the writer's NIC. What the sums see now, the steps of later sequences see too.
                if !unseen && let Err(error) = summer.memory.show_remote_writes() {
                    return Verified::Failed(SumError::Failed(error));
                }
                let check = |sums, run| Ok(sums + check(summer, map, tokens, &blocks, &heads, run)?);
                match runs.iter().try_fold(0, check) {
                    Ok(sums) => Verified::Checked(Ok(sums)),
                    Err(Fault::Differs(detail)) => Verified::Checked(Err(detail)),
                    Err(Fault::NotSummed(error)) => Verified::Failed(error),
                }
            }
        }
    }
}

/// Why a run does not match.
enum Fault {
    /// Where a sum differs, or what is wrong with the run.
    Differs(String),
    NotSummed(SumError),
}

impl From<&str> for Fault {
    fn from(detail: &str) -> Self {
        Self::Differs(detail.into())
    }
}

/// Number of sums of the run that match, or the position of the first that does not.
fn check(
    summer: &Summer<'_>,
    map: &KvPoolMap,
    tokens: u32,
    blocks: &BlockTables,
    heads: &Heads,
    run: &SumRun,
) -> Result<u64, Fault> {
    let (group, layer) = (usize::from(run.group), usize::from(run.layer));
    let shape = map.layout().groups().get(group).filter(|g| layer < g.layers.len());
    let planes = shape.map(|g| g.planes.len()).ok_or("checksums of a layer that does not exist")?;
    let granules = run.sums.len() / planes;
    let start = run.first_granule.checked_mul(GRANULE).filter(|&start| start < tokens);
    let start = start.filter(|_| granules > 0 && run.sums.len().is_multiple_of(planes));
    let start = start.ok_or("checksums of positions that were not reserved")?;
    let end = (u64::from(start) + granules as u64 * u64::from(GRANULE)).min(u64::from(tokens)) as u32;
    let found = summer.layer(map, &blocks.0[group], heads, group, layer, start..end).map_err(Fault::NotSummed)?;
    if found.len() != run.sums.len() {
        return Err("checksums of positions that were not reserved".into());
    }
    match found.iter().zip(&run.sums).position(|(a, b)| a != b) {
        None => Ok(found.len() as u64),
        Some(_) if seeded!(UnverifiedKv) => Ok(found.len() as u64),
        Some(at) => {
            let name = map.layout().groups()[group].planes[at % planes].name();
            let token = start + (at / planes) as u32 * GRANULE;
            if shape.is_some_and(|group| group.kind == GroupKind::State) {
                let at =
                    format!("group {group}, layer {layer} of it, plane {name} of the state behind {tokens} tokens");
                return Err(Fault::Differs(format!("{at}: checksum differs")));
            }
            let at = format!("group {group}, layer {layer} of it, plane {name}, tokens from {token}");
            Err(Fault::Differs(format!("{at}: checksum differs")))
        }
    }
}
