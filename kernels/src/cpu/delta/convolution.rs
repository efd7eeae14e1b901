//! The causal convolution of channels, and SiLU.

use super::plane;
use crate::cpu::lines::Lines;
use crate::cpu::simd::{Kernel, LANES, Simd, silu};
use crate::cpu::{CpuKernels, Shared};
use crate::host::KvStep;
use crate::numerics;
use crate::program::TAPS_MAX;
use std::cell::RefCell;
use std::ops::Range;

/// Channels of a task: enough for vectors, and few enough that a decoded row has work for all threads.
const CHANNELS: usize = 256;

thread_local! {
    static LANE: RefCell<Lines> = const { RefCell::new(Lines::new()) };
}

/// As [`HostKernels::convolve`](crate::host::HostKernels::convolve). A task has all rows of a segment, and some channels of one part.
pub(in crate::cpu) fn convolve(kernels: &CpuKernels, step: KvStep<'_>, taps: &[f32], x: [&mut [f32]; 3]) {
    let rows = step.rows();
    if rows == 0 {
        return;
    }
    let columns = x.each_ref().map(|part| part.len() / rows);
    assert!((0..3).all(|part| x[part].len() == rows * columns[part]));
    let channels: usize = columns.iter().sum();
    let count = taps.len() / channels;
    assert!(taps.len() == count * channels && (2..=TAPS_MAX).contains(&count));
    let of_inputs = step.kv.planes()[0];
    assert_eq!(step.kv.plane_bytes(of_inputs), (count - 1) * channels * size_of::<f32>());
    let chunks = columns.map(|columns| columns.div_ceil(CHANNELS));
    let each: usize = chunks.iter().sum();
    let x = x.map(|part| Shared(part.as_mut_ptr()));
    kernels.threads.run(step.segments.len() * each, &|task| {
        let (index, mut chunk) = (task / each, task % each);
        let (mut part, mut first) = (0, 0);
        while chunk >= chunks[part] {
            chunk -= chunks[part];
            first += columns[part];
            part += 1;
        }
        let within = chunk * CHANNELS..((chunk + 1) * CHANNELS).min(columns[part]);
        let segment = &step.segments[index];
        let row: usize = step.segments[..index].iter().map(|segment| segment.rows).sum();
        let (read, written) = segment.states();
        let inputs =
            |block| plane(step.kv, step.layer, of_inputs, block).cast::<f32>().wrapping_add(first + within.start);
        let channel = first + within.start;
        LANE.with_borrow_mut(|kept| {
            kernels.level.run(Convolve {
                taps,
                channels,
                channel,
                count,
                width: within.len(),
                // The rows and columns of one task.
                x: x[part].get().wrapping_add(row * columns[part] + within.start),
                stride: columns[part],
                rows: segment.rows,
                read: read.map(|block| inputs(block).cast_const()),
                written: inputs(written),
                kept: kept.room::<f32>(2 * (count - 1) * CHANNELS),
            });
        });
    });
}

/// Some channels of the rows of a segment.
struct Convolve<'a> {
    /// `[taps, channels]`
    taps: &'a [f32],
    channels: usize,
    /// The first channel, taps, and how many channels.
    channel: usize,
    count: usize,
    width: usize,
    /// The first channel of the first row, and how far rows are apart. Nobody else touches these channels of the rows.
    x: *mut f32,
    stride: usize,
    rows: usize,
    /// Inputs before the rows, `[taps - 1, channels]`, from the first channel on; `None`: zeros. And those behind them, which may be the same.
    read: Option<*const f32>,
    written: *mut f32,
    /// Room for inputs before and behind, `[taps - 1, width]` each.
    kept: *mut f32,
}

impl Kernel for Convolve<'_> {
    type Out = ();

    #[inline(always)]
    fn call<S: Simd>(self, s: S) {
        let Self { channels, count, width, x, stride, rows, read, written, kept, .. } = self;
        let inputs = count - 1;
        let before = |i: usize| kept.wrapping_add(i * width);
        let behind = |i: usize| kept.wrapping_add((inputs + i) * width);
        // Input `i` of the segment, counted from the first that is kept.
        let input = |i: usize| if i < inputs { before(i) } else { x.wrapping_add((i - inputs) * stride) };
        // SAFETY: rows of `width` f32: of `kept`, of the pool's plane, and of `x`, which do not overlap each other. The plane was checked, and
        // nothing promises the alignment of its rows.
        unsafe {
            let copy = |from: *const f32, to: *mut f32| {
                std::ptr::copy_nonoverlapping(from.cast::<u8>(), to.cast::<u8>(), width * size_of::<f32>());
            };
            for i in 0..inputs {
                match read {
                    Some(read) => copy(read.wrapping_add(i * channels), before(i)),
                    None => before(i).write_bytes(0, width),
                }
            }
            (0..inputs).for_each(|i| copy(input(rows + i), behind(i)));
            (0..inputs).for_each(|i| copy(behind(i), written.wrapping_add(i * channels)));
        }
        // The last row first: a row is an input of those behind it.
        for row in (0..rows).rev() {
            let from: [*const f32; TAPS_MAX] = std::array::from_fn(|tap| input(row + tap.min(inputs)).cast_const());
            self.row(s, &from[..count], input(row + inputs), 0..width);
        }
    }
}

impl Convolve<'_> {
    /// One row from its inputs, the last of which is where it is stored.
    #[inline(always)]
    fn row<S: Simd>(&self, s: S, from: &[*const f32], to: *mut f32, within: Range<usize>) {
        let taps = |tap: usize| &self.taps[tap * self.channels + self.channel..][..within.len()];
        let whole = within.len() / LANES * LANES;
        for at in (0..whole).step_by(LANES) {
            let mut acc = s.splat(0.0);
            // SAFETY: a vector of channels of the inputs, of the taps and of the row.
            unsafe {
                for (tap, from) in from.iter().enumerate() {
                    acc = s.fma(s.load(from.add(at)), s.load(taps(tap).as_ptr().add(at)), acc);
                }
                s.store(to.add(at), silu(s, acc));
            }
        }
        for at in whole..within.len() {
            let mut acc = 0.0f32;
            // SAFETY: a channel of the same.
            unsafe {
                for (tap, from) in from.iter().enumerate() {
                    acc = (*from.add(at)).mul_add(taps(tap)[at], acc);
                }
                *to.add(at) = numerics::silu(acc);
            }
        }
    }
}
