//! A driver that checks another one, command by command.
//!
//! It keeps a copy of the device's memory in the host's. Each kernel runs twice: by its host twin on the copy, and on the device. Before, every byte
//! that the twin writes and has not read is poisoned on the device. Afterwards every allocation that the twin wrote to must be equal, byte for
//! byte, and so must what lies before and behind it. So another result, a byte that is not written, and one that is written beside the output
//! are all seen, and named after the kernel. A graph is checked as one kernel, or taken apart into its kernels.
//!
//! A host twin is scalar code; for products, the CPU's vector kernels of the class, which are checked against the scalar twin.
//!
//! Commands end before the next one begins.

use super::command::{Arguments, Product};
use super::recorder::memory::{Marks, Memory, POISON, mark};
use super::recorder::twin::Twin;
use super::{
    Address, Algorithm, Command, Copies, Driver, Event, Gpu, GraphId, InUse, Launch, Pinned, Purpose, Stream, end_of,
};
use crate::cuda::arguments::model::Gemm;
use crate::cuda::arguments::sampling::{LOGPROBS_MAX, SampleRecord, status};
use crate::cuda::arguments::{Argument, In};
use crate::device::DeviceError;
use crate::numerics::{Half, TensorCore};
use baton_types::FenceStatus;
use parking_lot::Mutex;
use std::collections::{BTreeMap, HashMap};
use std::mem::offset_of;
use std::ops::Range;
use std::sync::Arc;

/// Bytes before and behind an allocation, where nothing may be written.
const GUARD: usize = 4096;

/// Bytes that are moved at once.
const PIECE: usize = 4 << 20;

/// What outputs hold before a kernel runs: no NaN, since any NaN equals another.
const UNWRITTEN: u8 = 0xa5;

/// Differences that are kept.
const FINDINGS_MAX: usize = 100;

/// Where a device differs from the twin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The kernel, or `graph of` so many.
    pub what: String,
    /// What the memory is for.
    pub memory: String,
    /// The first byte that differs, from the start of the allocation; negative, or behind its end, in the guards.
    pub at: i64,
    /// Bytes that differ.
    pub bytes: usize,
    /// What is there: up to eight bytes.
    pub got: Vec<u8>,
    /// What the twin has there.
    pub want: Vec<u8>,
}

/// What was compared.
#[derive(Clone, Debug, Default)]
pub struct Compared {
    /// Launches by kernel.
    pub launches: BTreeMap<String, u64>,
    /// Graphs that were checked as one.
    pub graphs: u64,
    /// Bytes that were written and equal.
    pub bytes: u64,
    /// The first differences.
    pub findings: Vec<Finding>,
    /// How many there were.
    pub found: u64,
}

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Checked {
    inner: Arc<dyn Driver>,
    copies: Copies,
    /// Whether graphs are taken apart.
    apart: bool,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    twin: Twin,
    shadow: Memory,
    names: HashMap<u64, String>,
    graphs: HashMap<u32, Vec<Command>>,
    compared: Compared,
}

impl Checked {
    /// Checks `inner`, which computes this class.
    pub(crate) fn new(
        inner: Arc<dyn Driver>,
        cores: TensorCore,
        half: Half,
        apart: bool,
    ) -> Result<Arc<Self>, DeviceError> {
        let state = State {
            twin: Twin { cores, half, defect: None },
            shadow: Memory::default(),
            names: HashMap::new(),
            graphs: HashMap::new(),
            compared: Compared::default(),
        };
        let copies = Copies::new(&inner, Purpose::Copies, PIECE)?;
        Ok(Arc::new(Self { inner, copies, apart, state: Mutex::new(state) }))
    }

    /// Compares all memory, and returns what was compared since the last call.
    pub(crate) fn take(&self) -> Result<Compared, DeviceError> {
        let mut state = self.state.lock();
        for at in state.shadow.starts() {
            self.compare(&mut state, "what no kernel wrote to", at, &[], &[])?;
        }
        Ok(std::mem::take(&mut state.compared))
    }

    fn synchronous(&self, stream: Stream, command: &Command) -> Result<(), DeviceError> {
        self.inner.enqueue(stream, command)?;
        end_of(&*self.inner, self.inner.record(stream)?)
    }

    /// Stores the same byte to some device memory.
    fn fill(&self, at: Address, bytes: usize, value: u8) -> Result<(), DeviceError> {
        self.copies.repeat(&vec![value; bytes.min(PIECE)], at, bytes)
    }

    /// Runs commands by the twin and as `submit` does, and compares.
    fn check(
        &self,
        state: &mut State,
        what: &str,
        commands: &[Command],
        submit: &dyn Fn() -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        state.shadow.track();
        let mut scratch: Vec<Range<u64>> = Vec::new();
        for command in commands {
            let twin = state.twin;
            match command {
                Command::Launch(launch) => {
                    twin.run(launch, &mut state.shadow);
                    scratch.extend(unspecified(launch, &state.shadow));
                }
                Command::Product(Product { product, .. }) => twin.gemm(product, &mut state.shadow),
                _ => return Err(DeviceError::Failed("a graph of other commands than kernels".into())),
            }
            *state.compared.launches.entry(name_of(command)).or_default() += 1;
        }
        let marks = state.shadow.tracked();
        for (at, range) in outputs(&marks) {
            self.fill(at.plus(range.start), range.len(), UNWRITTEN)?;
        }
        submit()?;
        for (at, marks) in marks.iter().filter(|(_, marks)| marks.iter().any(|mark| mark & mark::WRITTEN != 0)) {
            self.compare(state, what, Address(*at), marks, &scratch)?;
        }
        // Scratch is compared nowhere, and its bytes are the device's.
        let starts: Vec<Address> = scratch.iter().filter_map(|range| start_of(&state.shadow, range.start)).collect();
        for at in starts {
            let bytes = state.shadow.whole(at).len();
            let device = self.copies.load(at, bytes)?;
            state.shadow.whole(at).copy_from_slice(&device);
        }
        Ok(())
    }

    /// Compares an allocation. Afterwards the copy is what the device has, so that a difference is seen once.
    fn compare(
        &self,
        state: &mut State,
        what: &str,
        at: Address,
        marks: &[u8],
        scratch: &[Range<u64>],
    ) -> Result<(), DeviceError> {
        let len = state.shadow.whole(at).len();
        let device = self.copies.load(Address(at.0 - GUARD as u64), len + 2 * GUARD)?;
        let half = state.twin.half;
        let mut want = vec![POISON; GUARD];
        want.extend_from_slice(state.shadow.whole(at));
        want.extend([POISON; GUARD]);
        let mut different = Vec::new();
        if device != want {
            let skipped = |i: usize| scratch.iter().any(|range| range.contains(&(at.0 + (i - GUARD) as u64)));
            for i in (0..device.len()).filter(|i| device[*i] != want[*i]) {
                let mark = i.checked_sub(GUARD).and_then(|i| marks.get(i)).copied().unwrap_or(0);
                let inside = (GUARD..GUARD + len).contains(&i);
                let may_differ = (inside && skipped(i)) || are_nan(mark, half, i, &device, &want);
                if !may_differ {
                    different.push(i);
                }
            }
        }
        let compared = &mut state.compared;
        compared.bytes += marks.iter().filter(|mark| *mark & mark::WRITTEN != 0).count() as u64;
        if let Some(first) = different.first().copied() {
            compared.found += 1;
            if compared.findings.len() < FINDINGS_MAX {
                let some = |of: &[u8]| of[first..(first + 8).min(of.len())].to_vec();
                compared.findings.push(Finding {
                    what: what.to_owned(),
                    memory: state.names.get(&at.0).cloned().unwrap_or_default(),
                    at: first as i64 - GUARD as i64,
                    bytes: different.len(),
                    got: some(&device),
                    want: some(&want),
                });
            }
            self.fill(Address(at.0 - GUARD as u64), GUARD, POISON)?;
            self.fill(at.plus(len), GUARD, POISON)?;
        }
        state.shadow.whole(at).copy_from_slice(&device[GUARD..GUARD + len]);
        Ok(())
    }
}

/// What a finding calls a command.
fn name_of(command: &Command) -> String {
    match command {
        Command::Launch(launch) => launch.kernel.clone(),
        Command::Product(Product { by, .. }) => format!("product by {}", by.id),
        other => format!("{other:?}"),
    }
}

/// Whether the number that a byte belongs to is NaN on both sides: its payload is not specified.
fn are_nan(mark: u8, half: Half, at: usize, got: &[u8], want: &[u8]) -> bool {
    let is_nan = |of: &[u8]| {
        if mark & mark::F32 != 0 {
            let first = at / 4 * 4;
            f32::from_le_bytes([of[first], of[first + 1], of[first + 2], of[first + 3]]).is_nan()
        } else if mark & mark::HALF != 0 {
            let first = at / 2 * 2;
            half.to_f32(u16::from_le_bytes([of[first], of[first + 1]])).is_nan()
        } else {
            false
        }
    };
    is_nan(got) && is_nan(want)
}

/// Bytes that are written and were not read before, by allocation.
fn outputs(marks: &Marks) -> Vec<(Address, Range<usize>)> {
    let mut all = Vec::new();
    for (at, marks) in marks {
        let is_output = |mark: &u8| mark & (mark::WRITTEN | mark::READ) == mark::WRITTEN;
        let mut from = 0;
        while let Some(first) = marks[from..].iter().position(is_output).map(|i| from + i) {
            let end = marks[first..].iter().position(|mark| !is_output(mark)).map_or(marks.len(), |i| first + i);
            all.push((Address(*at), first..end));
            from = end;
        }
    }
    all
}

/// Bytes that may be anything after a kernel: its scratch memory, and fields of a record that its status leaves open.
fn unspecified(launch: &Launch, shadow: &Memory) -> Vec<Range<u64>> {
    let Arguments::Sample(a) = &launch.arguments else { return Vec::new() };
    let (Some(adjusted), Some(records)) = (a.adjusted.address(), a.records.address()) else { return Vec::new() };
    let mut all = Vec::new();
    all.push(adjusted.0..adjusted.0 + a.rows as u64 * a.vocab as u64 * 4);
    for row in 0..a.rows as usize {
        let record: SampleRecord = shadow.element(In::at(records), row);
        let at = records.0 + (row * SampleRecord::BYTES) as u64;
        let mut open = |fields: Range<usize>| all.push(at + fields.start as u64..at + fields.end as u64);
        let (tokens, logits) = (offset_of!(SampleRecord, top_tokens), offset_of!(SampleRecord, top_logits));
        match record.status {
            status::SAMPLED => {
                let (used, most) = (record.top_len as usize * 4, LOGPROBS_MAX * 4);
                open(tokens + used..tokens + most);
                open(logits + used..logits + most);
            }
            status::NOT_REACHED => open(4..SampleRecord::BYTES),
            _ => {
                open(offset_of!(SampleRecord, chosen)..offset_of!(SampleRecord, top_len));
                open(offset_of!(SampleRecord, sum)..SampleRecord::BYTES);
            }
        }
    }
    all
}

/// The allocation that an address is in.
fn start_of(memory: &Memory, at: u64) -> Option<Address> {
    memory.starts().into_iter().rfind(|start| start.0 <= at)
}

impl Driver for Checked {
    fn gpu(&self) -> &Gpu {
        self.inner.gpu()
    }

    fn memory_free(&self) -> Result<u64, DeviceError> {
        self.inner.memory_free()
    }

    fn alloc(&self, bytes: usize, what: &str) -> Result<Address, DeviceError> {
        let at = self.inner.alloc(bytes + 2 * GUARD, what)?;
        let mut state = self.state.lock();
        self.fill(at, bytes + 2 * GUARD, POISON)?;
        let at = at.plus(GUARD);
        state.shadow.insert(at, bytes);
        state.names.insert(at.0, what.to_owned());
        Ok(at)
    }

    fn free(&self, at: Address) {
        let mut state = self.state.lock();
        if let Err(error) = self.compare(&mut state, "what no kernel wrote to", at, &[], &[]) {
            tracing::warn!(%error, "memory is not compared before it is freed");
        }
        state.shadow.free(at);
        self.inner.free(Address(at.0 - GUARD as u64));
    }

    fn pinned(&self, bytes: usize) -> Result<Arc<dyn Pinned>, DeviceError> {
        self.inner.pinned(bytes)
    }

    fn stream(&self, purpose: Purpose) -> Result<Stream, DeviceError> {
        self.inner.stream(purpose)
    }

    fn enqueue(&self, stream: Stream, command: &Command) -> Result<(), DeviceError> {
        let mut state = self.state.lock();
        let state = &mut *state;
        match command {
            Command::Upload { from, offset, to, bytes } => {
                let mut data = vec![0; *bytes];
                from.load(*offset, &mut data);
                state.shadow.bytes_mut(*to, *bytes).copy_from_slice(&data);
                self.synchronous(stream, command)
            }
            Command::Clear { at, bytes } => {
                state.shadow.bytes_mut(*at, *bytes).fill(0);
                self.synchronous(stream, command)
            }
            Command::Download { .. } => self.synchronous(stream, command),
            Command::Launch(_) | Command::Product(Product { pinned: true, .. }) => {
                let what = name_of(command);
                self.check(state, &what, std::slice::from_ref(command), &|| self.synchronous(stream, command))
            }
            // A trial: it may have any bits.
            Command::Product(Product { product, .. }) => {
                self.synchronous(stream, command)?;
                let out = product.out.address().and_then(|at| start_of(&state.shadow, at.0));
                let out = out.ok_or_else(|| DeviceError::Failed("a product without an output".into()))?;
                let bytes = state.shadow.whole(out).len();
                let device = self.copies.load(out, bytes)?;
                state.shadow.whole(out).copy_from_slice(&device);
                Ok(())
            }
            Command::Graph(graph) => {
                let Some(commands) = state.graphs.get(&graph.0).cloned() else {
                    return Err(DeviceError::Failed("a graph of another driver".into()));
                };
                if self.apart {
                    for command in &commands {
                        let what = name_of(command);
                        let submit = || self.synchronous(stream, command);
                        self.check(state, &what, std::slice::from_ref(command), &submit)?;
                    }
                    return Ok(());
                }
                state.compared.graphs += 1;
                let what = format!("graph of {}", commands.len());
                self.check(state, &what, &commands, &|| self.synchronous(stream, command))
            }
        }
    }

    fn algorithms(&self, product: &Gemm) -> Result<Vec<Algorithm>, DeviceError> {
        self.inner.algorithms(product)
    }

    fn in_use(&self) -> &InUse {
        self.inner.in_use()
    }

    fn show_remote_writes(&self) -> Result<(), DeviceError> {
        self.inner.show_remote_writes()
    }

    fn graph(&self, commands: &[Command]) -> Result<GraphId, DeviceError> {
        let graph = self.inner.graph(commands)?;
        self.state.lock().graphs.insert(graph.0, commands.to_vec());
        Ok(graph)
    }

    fn record(&self, stream: Stream) -> Result<Event, DeviceError> {
        self.inner.record(stream)
    }

    fn poll(&self, event: Event) -> FenceStatus {
        self.inner.poll(event)
    }

    fn wait(&self, event: Event) -> Result<(), DeviceError> {
        self.inner.wait(event)
    }

    fn forget(&self, event: Event) {
        self.inner.forget(event);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::arguments::Out;
    use crate::cuda::arguments::sampling::ClearCounts;
    use crate::cuda::driver::recorder::Recorder;
    use crate::cuda::launch::Launcher;

    /// Stores beside an output and to memory of something else, behind the back of the checked driver.
    #[test]
    fn what_is_written_beside_an_output_is_found_once() {
        let recorder: Arc<dyn Driver> = Recorder::new(TensorCore::Tc16F25, Half::Bf16, 64 << 20);
        let checked = Checked::new(recorder.clone(), TensorCore::Tc16F25, Half::Bf16, false).unwrap();
        let (counts, other) = (checked.alloc(64, "counts").unwrap(), checked.alloc(64, "another").unwrap());
        let stream = checked.stream(Purpose::Steps).unwrap();
        let clear = ClearCounts { counts: Out::at(counts), row: 0, vocab: 16 };
        let launch = || checked.enqueue(stream, &Command::Launch(Launcher::clear_counts(clear))).unwrap();
        launch();
        assert_eq!(checked.take().unwrap().found, 0);
        for (to, at, what) in [
            (Address(counts.0 - 8), -8, "clear_counts"),
            (counts.plus(64), 64, "clear_counts"),
            (other.plus(12), 12, "what no kernel wrote to"),
        ] {
            let stray = Command::Clear { at: to, bytes: 4 };
            recorder.enqueue(stream, &stray).unwrap();
            launch();
            let Compared { findings, found, .. } = checked.take().unwrap();
            let [finding] = &findings[..] else { panic!("{findings:?}") };
            assert_eq!((found, finding.at, finding.bytes, finding.what.as_str()), (1, at, 4, what));
            launch();
            assert_eq!(checked.take().unwrap().findings, []);
        }
    }
}
