//! The launching side's view of the slots: block tables and lengths. A step is checked against it before anything is enqueued.

use super::{AdapterSlot, Delta, Join, Launched, RowId, Segments, SlotRows, StepInput, StepOutput, StepSegment};
use crate::device::{Bounds, DeviceError, STEPS_MAX};
use baton_types::{BlockId, BlockTable, BlockTables, GroupKind};
use std::collections::VecDeque;
use std::ops::Range;

/// What bounds a step: its program, its vocabulary and its pool.
#[allow(missing_docs, reason = "the names of fields say it")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepLimits {
    pub bounds: Bounds,
    pub vocab: usize,
    pub layers: u32,
    /// Tokens of a block.
    pub block_tokens: usize,
    /// The groups of the pool.
    pub groups: Vec<GroupLimits>,
}

/// One group of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupLimits {
    /// Which positions the blocks of a sequence keep.
    pub kind: GroupKind,
    /// Number of blocks.
    pub blocks: u32,
}

/// A sequence in a slot.
#[derive(Clone, Debug)]
struct Slot {
    /// Which join this is, counted over all slots.
    join: u64,
    tables: BlockTables,
    /// Its tokens once every launched step is done; `None` while a launched step decides how many drafts are accepted.
    tokens: Option<usize>,
    /// Whether it has sampled since it joined.
    has_sampled: bool,
    adapter: Option<AdapterSlot>,
}

/// Drafts of a launched step.
#[derive(Clone, Copy, Debug)]
struct Drafted {
    slot: usize,
    join: u64,
    /// Tokens before the first of its rows that samples.
    tokens: usize,
}

/// All slots, as they will be when every launched step is done.
#[derive(Debug)]
pub struct SlotTable {
    slots: Vec<Option<Slot>>,
    /// Which adapters are loaded.
    adapters: Vec<bool>,
    joins: u64,
    /// Drafts of each launched step, oldest first.
    launched: VecDeque<Vec<Drafted>>,
    checks: Checks,
}

/// Memory of the checks of a step.
#[derive(Debug, Default)]
struct Checks {
    undo: Undo,
    /// Slots that the step has named.
    named: Vec<bool>,
    /// Blocks that it stores to, each with its segment.
    stored: Vec<(BlockId, usize)>,
}

/// A slot before a step that may yet be refused.
type Undo = Vec<(usize, Option<Slot>)>;

fn refuse<T>(message: String) -> Result<T, DeviceError> {
    Err(DeviceError::Step(message))
}

impl SlotTable {
    /// Free slots.
    pub fn new(slots_max: usize) -> Self {
        Self::with_adapters(slots_max, 0)
    }

    /// Free slots of sequences, and of adapters.
    pub fn with_adapters(slots_max: usize, adapters_max: usize) -> Self {
        let (slots, adapters) = (vec![None; slots_max], vec![false; adapters_max]);
        Self { slots, adapters, joins: 0, launched: VecDeque::new(), checks: Checks::default() }
    }

    /// An adapter is loaded from the next step on, or no longer. Refused while a sequence uses it.
    pub fn set_adapter(&mut self, adapter: AdapterSlot, is_loaded: bool) -> Result<(), DeviceError> {
        let slots_max = self.adapters.len();
        let Some(loaded) = self.adapters.get_mut(adapter.0 as usize) else {
            return Err(DeviceError::AdapterSlots { slot: adapter, slots_max });
        };
        if self.slots.iter().flatten().any(|slot| slot.adapter == Some(adapter)) {
            return Err(DeviceError::AdapterInUse(adapter));
        }
        *loaded = is_loaded;
        Ok(())
    }

    /// Frees slots without a step.
    pub fn leave(&mut self, slots: &[usize]) -> Result<(), DeviceError> {
        slots.iter().try_for_each(|slot| self.slot(*slot).map(|_| ()))?;
        slots.iter().for_each(|slot| self.slots[*slot] = None);
        Ok(())
    }

    /// The adapter of the sequence in a slot, as of the step launched last.
    pub fn adapter(&self, slot: usize) -> Option<AdapterSlot> {
        self.slots.get(slot)?.as_ref()?.adapter
    }

    /// Steps that are launched and not finished.
    pub fn launched(&self) -> usize {
        self.launched.len()
    }

    /// Checks every bound of a step, so that no operation gets an index out of range, and notes it as launched. Writes its segments with their
    /// block tables, and its selected rows, to `to`. A refused step changes nothing but that.
    pub fn launch(&mut self, step: &StepInput, limits: &StepLimits, to: &mut Launched) -> Result<(), DeviceError> {
        let joins = self.joins;
        let mut checks = std::mem::take(&mut self.checks);
        let checked = self.check(step, limits, &mut checks, to);
        if checked.is_err() {
            checks.undo.drain(..).rev().for_each(|(slot, before)| self.slots[slot] = before);
            self.joins = joins;
        }
        checks.undo.clear();
        self.checks = checks;
        checked?;
        let mut drafts = Vec::new();
        for rows in step.segments.iter().filter(|rows| rows.samples > 0) {
            let Some(slot) = &mut self.slots[rows.slot] else { continue };
            slot.has_sampled = true;
            let tokens = slot.tokens.unwrap_or(0);
            if rows.samples > 1 {
                drafts.push(Drafted { slot: rows.slot, join: slot.join, tokens });
            }
            slot.tokens = (rows.samples == 1).then_some(tokens + 1);
        }
        self.launched.push_back(drafts);
        Ok(())
    }

    /// The oldest launched step is finished, with this output. Where it accepted drafts, the slot's length is known again.
    pub fn finish(&mut self, output: &StepOutput) {
        for Drafted { slot, join, tokens } in self.launched.pop_front().unwrap_or_default() {
            let sampled = output.sampled.iter().find(|sampled| sampled.slot == slot);
            let added = sampled.map_or(0, |sampled| sampled.rows.iter().filter(|row| row.is_ok()).count());
            if let Some(slot) = self.slots[slot].as_mut().filter(|slot| slot.join == join) {
                slot.tokens = Some(tokens + added);
            }
        }
    }

    fn check(
        &mut self,
        step: &StepInput,
        limits: &StepLimits,
        checks: &mut Checks,
        to: &mut Launched,
    ) -> Result<(), DeviceError> {
        let launched = self.launched.len();
        if launched >= STEPS_MAX {
            return refuse(format!("{launched} steps are not finished: finish one first"));
        }
        step.check_rows(limits, &mut to.selected)?;
        step.deltas.iter().try_for_each(|delta| self.apply(delta, limits, &mut checks.undo))?;
        to.segments.resize_with(limits.groups.len(), Segments::default);
        to.segments.iter_mut().for_each(Segments::clear);
        let named = &mut checks.named;
        named.clear();
        named.resize(self.slots.len(), false);
        let mut first = 0;
        for rows in &step.segments {
            let ids = &step.ids[first..first + rows.rows];
            first += rows.rows;
            let slot = self.slot(rows.slot)?;
            if std::mem::replace(&mut named[rows.slot], true) {
                return refuse(format!("two segments of slot {}", rows.slot));
            }
            check_rows_of(slot, rows, ids, limits)?;
            for (of_group, table) in to.segments.iter_mut().zip(&slot.tables.0) {
                of_group.push(rows.position, rows.rows, table);
            }
        }
        let mut groups = to.segments.iter().zip(&limits.groups);
        groups.try_for_each(|(segments, group)| {
            check_stores(segments.as_slice(), group.kind, limits.block_tokens, &mut checks.stored)
        })
    }

    fn slot(&self, index: usize) -> Result<&Slot, DeviceError> {
        match self.slots.get(index) {
            Some(Some(slot)) => Ok(slot),
            Some(None) => refuse(format!("slot {index} is free")),
            None => refuse(format!("slot {index} of {}", self.slots.len())),
        }
    }

    /// Applies one delta, and notes the slot as it was.
    fn apply(&mut self, delta: &Delta, limits: &StepLimits, undo: &mut Undo) -> Result<(), DeviceError> {
        let known = |group: usize, blocks: &[BlockId]| match limits.groups.get(group) {
            None => refuse(format!("group {group} of {}", limits.groups.len())),
            Some(GroupLimits { blocks: all, .. }) => match blocks.iter().find(|block| block.0 >= *all) {
                Some(block) => refuse(format!("block {block} of a pool of {all}")),
                None => Ok(()),
            },
        };
        let (index, next) = match delta {
            Delta::Join(join) => {
                match self.slots.get(join.slot) {
                    Some(None) => {}
                    Some(Some(_)) => return refuse(format!("slot {} is taken", join.slot)),
                    None => return refuse(format!("slot {} of {}", join.slot, self.slots.len())),
                }
                let tables = &join.tables.0;
                if tables.len() != limits.groups.len() {
                    return refuse(format!("{} tables for {} groups", tables.len(), limits.groups.len()));
                }
                tables.iter().enumerate().try_for_each(|(group, table)| known(group, &table.blocks))?;
                join.check(limits)?;
                let is_loaded = |adapter: &AdapterSlot| self.adapters.get(adapter.0 as usize) == Some(&true);
                if let Some(unknown) = join.adapter.filter(|adapter| !is_loaded(adapter)) {
                    return Err(DeviceError::UnknownAdapter(unknown));
                }
                self.joins += 1;
                let (tables, tokens) = (join.tables.clone(), Some(join.tokens.len()));
                let slot = Slot { join: self.joins, tables, tokens, has_sampled: false, adapter: join.adapter };
                (join.slot, Some(slot))
            }
            Delta::Blocks { slot, group, first, keep, blocks } => {
                let mut next = self.slot(*slot)?.clone();
                known(*group, blocks)?;
                change(&mut next.tables.0[*group], limits.groups[*group].kind, *first, *keep, blocks)?;
                (*slot, Some(next))
            }
            Delta::Leave { slot } => {
                self.slot(*slot)?;
                (*slot, None)
            }
        };
        undo.push((index, std::mem::replace(&mut self.slots[index], next)));
        Ok(())
    }
}

/// Keeps the blocks at `first .. keep` of a table, and adds others after them. A table of states may begin anew at any index.
fn change(
    table: &mut BlockTable,
    kind: GroupKind,
    first: usize,
    keep: usize,
    blocks: &[BlockId],
) -> Result<(), DeviceError> {
    let known = table.indices();
    if !kind.is_by_position() && first == keep {
        table.blocks.clear();
        table.blocks.extend_from_slice(blocks);
        table.first = first;
        return Ok(());
    }
    if !(known.start <= first && first <= keep && keep <= known.end) {
        return refuse(format!("blocks {first}..{keep} kept of {known:?}"));
    }
    table.blocks.truncate(keep - known.start);
    table.blocks.drain(..first - known.start);
    table.blocks.extend_from_slice(blocks);
    table.first = first;
    Ok(())
}

impl Join {
    fn check(&self, limits: &StepLimits) -> Result<(), DeviceError> {
        let vocab = limits.vocab;
        let known = |token: u32| (token as usize) < vocab;
        if self.prompt_len > self.tokens.len() || self.tokens.len() > limits.bounds.positions_max {
            let (tokens, prompt, max) = (self.tokens.len(), self.prompt_len, limits.bounds.positions_max);
            return refuse(format!("{tokens} tokens join, {prompt} of them prompt; sequences hold {max}"));
        }
        if let Some(token) = self.tokens.iter().find(|token| !known(**token)) {
            return refuse(format!("token {token} of a vocabulary of {vocab}"));
        }
        if let Some((token, bias)) = self.bias.iter().find(|(token, bias)| !known(*token) || !bias.is_finite()) {
            return refuse(format!("a bias of {bias} for token {token} of a vocabulary of {vocab}"));
        }
        match self.allowed.as_ref().map(|allowed| allowed.last()) {
            Some(None) => refuse("an empty set of allowed tokens".into()),
            Some(Some(last)) if !known(last) => refuse(format!("token {last} of a vocabulary of {vocab} is allowed")),
            _ => Ok(()),
        }
    }
}

impl StepInput {
    /// Checks numbers of rows, and ids; selects rows.
    fn check_rows(&self, limits: &StepLimits, selected: &mut Vec<usize>) -> Result<(), DeviceError> {
        let (rows, bounds) = (self.ids.len(), &limits.bounds);
        if rows == 0 || rows > bounds.rows_max {
            return refuse(format!("{rows} rows, 1 to {} fit", bounds.rows_max));
        }
        let owned = self.segments.iter().fold(0usize, |sum, s| sum.saturating_add(s.rows));
        if owned != rows {
            return refuse(format!("segments own {owned} rows of {rows}"));
        }
        if let Some(SlotRows { samples, rows, .. }) = self.segments.iter().find(|s| s.samples > s.rows) {
            return refuse(format!("{samples} of {rows} rows sample"));
        }
        let logit_rows_max = bounds.logit_rows_max.min(rows);
        if self.logit_rows.len() > logit_rows_max {
            return refuse(format!("{} logit rows, {logit_rows_max} fit", self.logit_rows.len()));
        }
        if let Some(row) = self.logit_rows.iter().find(|&&row| row >= rows) {
            return refuse(format!("logit row {row} of {rows}"));
        }
        self.select_into(selected);
        let selected = selected.len();
        if selected > bounds.logit_rows_max {
            return refuse(format!("{selected} rows sample or return logits, {} fit", bounds.logit_rows_max));
        }
        let unknown = self.ids.iter().find_map(|id| match id {
            RowId::Token(token) if *token as usize >= limits.vocab => Some(token),
            _ => None,
        });
        if let Some(token) = unknown {
            return refuse(format!("token {token} of a vocabulary of {}", limits.vocab));
        }
        if self.observed.end > limits.layers {
            return refuse(format!("layers {:?} of {} are observed", self.observed, limits.layers));
        }
        Ok(())
    }
}

/// Checks a segment against its slot.
fn check_rows_of(slot: &Slot, segment: &SlotRows, ids: &[RowId], limits: &StepLimits) -> Result<(), DeviceError> {
    let SlotRows { slot: index, position, rows, samples, masks } = segment;
    let end = position.saturating_add(*rows);
    if *rows == 0 || end > limits.bounds.positions_max {
        return refuse(format!("{rows} rows from position {position}, sequences hold {}", limits.bounds.positions_max));
    }
    for (table, group) in slot.tables.0.iter().zip(&limits.groups) {
        let live = group.kind.live(*position..end, limits.block_tokens);
        if !group.kind.is_by_position() {
            check_states(table, *position, live)?;
            continue;
        }
        if table.end() < live.end {
            return refuse(format!("{} blocks for {end} positions", table.end()));
        }
        if table.first > live.start {
            return refuse(format!("blocks from {} on, position {position} attends to {}", table.first, live.start));
        }
    }
    let Some(tokens) = slot.tokens else {
        return refuse(format!("slot {index} waits for its drafts: its length is not known"));
    };
    // The first row that samples has the last token of the sequence; drafts follow it.
    if *samples > 0 && end - samples + 1 != tokens {
        return refuse(format!("slot {index} samples after {} tokens and has {tokens}", end - samples + 1));
    }
    if !masks.is_empty() && masks.len() != *samples {
        return refuse(format!("{} masks for {samples} rows that sample", masks.len()));
    }
    let last = tokens.checked_sub(position + 1).filter(|_| slot.has_sampled);
    match ids.iter().enumerate().find(|(row, id)| **id == RowId::LastSampled && Some(*row) != last) {
        Some((row, _)) => refuse(format!("row {row} of slot {index} is not at the token that it sampled last")),
        None => Ok(()),
    }
}

/// Checks that a table of states has the block of the state before `position`, which a first position does not need, and, if the step writes to
/// another one, that block behind it. `live` are the indices that positions need.
fn check_states(table: &BlockTable, position: usize, live: Range<usize>) -> Result<(), DeviceError> {
    let states = table.blocks.len();
    let most = if position == 0 { 1 } else { 2 };
    if table.first != live.start || !(1..=most).contains(&states) {
        let (first, start) = (table.first, live.start);
        return refuse(format!(
            "{states} states from index {first} on, a step from position {position} needs 1 to {most} from {start} on"
        ));
    }
    match table.blocks.as_slice() {
        [read, written] if read == written => refuse(format!("the state in block {read} is to be kept and changed")),
        _ => Ok(()),
    }
}

/// Checks that no segment's table of a group has a block that another one stores to: rows of one step are not ordered.
fn check_stores(
    segments: &[StepSegment],
    kind: GroupKind,
    size: usize,
    stored: &mut Vec<(BlockId, usize)>,
) -> Result<(), DeviceError> {
    stored.clear();
    for (index, s) in segments.iter().enumerate() {
        let blocks = match kind.is_by_position() {
            true => blocks_at(&s.table, s.position / size..s.end().div_ceil(size)),
            false => &s.table.blocks[s.table.blocks.len() - 1..],
        };
        stored.extend(blocks.iter().map(|block| (*block, index)));
    }
    stored.sort_unstable();
    for (index, s) in segments.iter().enumerate() {
        let used = match kind.is_by_position() {
            true => blocks_at(&s.table, kind.live(s.position..s.end(), size)),
            false => &s.table.blocks,
        };
        for block in used {
            let at = stored.partition_point(|(other, _)| other < block);
            let writers = stored[at..].iter().take_while(|(other, _)| other == block);
            if let Some((_, other)) = writers.into_iter().find(|(_, writer)| *writer != index) {
                return refuse(format!("segment {other} stores to block {block}, which segment {index} uses too"));
            }
        }
    }
    Ok(())
}

/// The blocks at these indices, which the table has.
fn blocks_at(table: &BlockTable, indices: Range<usize>) -> &[BlockId] {
    &table.blocks[indices.start - table.first..indices.end - table.first]
}
