//! Measures this machine's peak rates, as the reference for benchmarks.

use super::simd::{Kernel, Simd};
use super::{Level, SimdLevel};
#[cfg(target_arch = "x86_64")]
use crate::cpu::amx::Config;
use crate::cpu::buffer::Buffer;
use crate::cpu::{Avx2, Portable};
use crate::numerics::Numerics;
use std::hint::black_box;
use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Smallest buffer whose read rate is DRAM bandwidth: 512 MiB, at least eight times a common 32 MiB L3.
pub const READ_BYTES: usize = 512 << 20;

/// Rounds of a measurement; the best counts, because other processes may use the machine meanwhile.
const ROUNDS: usize = 100;

/// Length of one round: well within a time slice.
const ROUND: Duration = Duration::from_millis(4);

fn level() -> Level {
    Avx2::detect().map_or(Level::Portable(Portable), Level::Avx2)
}

/// Runs `work` on `threads` threads at once. Returns the total work per second of the slowest thread, in the best round.
fn rate(threads: usize, work: impl Fn(usize) -> f64 + Sync) -> f64 {
    let threads = threads.max(1);
    (0..ROUNDS).map(|_| round(threads, &work)).fold(0.0, f64::max)
}

fn round(threads: usize, work: &(impl Fn(usize) -> f64 + Sync)) -> f64 {
    let barrier = Barrier::new(threads);
    let timed = |i| {
        barrier.wait();
        let (start, mut done) = (Instant::now(), 0.0);
        while start.elapsed() < ROUND {
            done += work(i);
        }
        (done, start.elapsed().as_secs_f64())
    };
    let results: Vec<(f64, f64)> = std::thread::scope(|scope| {
        let timed = &timed;
        let handles: Vec<_> = (0..threads).map(|i| scope.spawn(move || timed(i))).collect();
        handles.into_iter().filter_map(|h| h.join().ok()).collect()
    });
    let slowest = results.iter().map(|r| r.1).fold(f64::MIN_POSITIVE, f64::max);
    results.iter().map(|r| r.0).sum::<f64>() / slowest
}

/// Peak of fused multiply-adds at the detected level with all operands in registers, in GFLOP/s (one fma is two).
pub fn fma_peak(threads: usize) -> f64 {
    #[cfg(target_arch = "x86_64")]
    if SimdLevel::Avx512.available() {
        // SAFETY: the processor has the instructions.
        return rate(threads, |_| unsafe { fma_chains() }) / 1e9;
    }
    rate(threads, |_| level().run(FmaChains)) / 1e9
}

/// Twelve independent chains: more than latency (4 or 5) times throughput (2) of any AVX2 machine, and all in registers.
struct FmaChains;

impl Kernel for FmaChains {
    type Out = f64;

    #[inline(always)]
    fn call<S: Simd>(self, s: S) -> f64 {
        const CHAINS: usize = 12;
        const STEPS: usize = 20_000;
        let (a, b) = (s.splat(black_box(0.999)), s.splat(black_box(0.001)));
        let mut acc = [s.splat(black_box(1.0)); CHAINS];
        for _ in 0..STEPS {
            for acc in &mut acc {
                *acc = s.fma(*acc, a, b);
            }
        }
        let mut sum = s.splat(0.0);
        for acc in acc {
            sum = s.add(sum, acc);
        }
        black_box(s.merge(sum));
        (CHAINS * STEPS * super::simd::LANES * 2) as f64
    }
}

/// Instructions that multiply matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MatrixInstruction {
    /// Fused multiply-adds of vectors of at most 256 bits.
    Fma,
    /// The same on 512 bits.
    Fma512,
    /// Products of bf16 on 512 bits.
    Vdpbf16ps,
    /// Products of bf16 on tiles.
    Tdpbf16ps,
    /// Products of bytes on 256 bits, in 16-bit words that another instruction adds.
    Vpmaddubsw,
    /// Products of bytes on 512 bits.
    Vpdpbusd,
}

impl MatrixInstruction {
    /// What the rates of a class are compared with here: the best that it can use, but for `i8x32` with AMX, whose products by TDPBSSD have
    /// their bound at about the peak of VPDPBUSD.
    pub fn of(numerics: Numerics) -> Self {
        match numerics {
            Numerics::Bf16x32 if SimdLevel::Amx.available() => Self::Tdpbf16ps,
            Numerics::Bf16x32 if SimdLevel::Avx512Bf16.available() => Self::Vdpbf16ps,
            Numerics::I8x32 if SimdLevel::Avx512Vnni.available() => Self::Vpdpbusd,
            Numerics::I8x32 if SimdLevel::Avx2Fma.available() => Self::Vpmaddubsw,
            _ if SimdLevel::Avx512.available() => Self::Fma512,
            _ => Self::Fma,
        }
    }

    /// For people.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fma => "FMA",
            Self::Fma512 => "FMA on 512 bits",
            Self::Vdpbf16ps => "VDPBF16PS",
            Self::Tdpbf16ps => "TDPBF16PS",
            Self::Vpmaddubsw => "VPMADDUBSW",
            Self::Vpdpbusd => "VPDPBUSD",
        }
    }
}

/// Peak of the instructions that multiply matrices of a class here, with all operands in registers, in GFLOP/s (or 1e9 operations a
/// second; a product and its addition are two).
pub fn matrix_peak(numerics: Numerics, threads: usize) -> f64 {
    peak(MatrixInstruction::of(numerics), threads)
}

/// As [`matrix_peak`], of an instruction that the processor has.
fn peak(instruction: MatrixInstruction, threads: usize) -> f64 {
    match instruction {
        #[cfg(target_arch = "x86_64")]
        MatrixInstruction::Tdpbf16ps => {
            // SAFETY: the processor has the instructions.
            rate(threads, |_| unsafe { tile_chains!("tdpbf16ps") }) / 1e9
        }
        #[cfg(target_arch = "x86_64")]
        MatrixInstruction::Vdpbf16ps => {
            // SAFETY: the processor has the instructions.
            rate(threads, |_| unsafe { bf16_chains() }) / 1e9
        }
        #[cfg(target_arch = "x86_64")]
        MatrixInstruction::Vpdpbusd => {
            // SAFETY: as above.
            rate(threads, |_| unsafe { i8_chains() }) / 1e9
        }
        #[cfg(target_arch = "x86_64")]
        MatrixInstruction::Vpmaddubsw => {
            // SAFETY: as above.
            rate(threads, |_| unsafe { i8_chains_avx2() }) / 1e9
        }
        _ => fma_peak(threads),
    }
}

/// Peak of VDPBF16PS with all operands in registers, in GFLOP/s; `None` where it is not. With AMX, `bf16x32` has a higher one.
pub fn vdpbf16ps_peak(threads: usize) -> Option<f64> {
    SimdLevel::Avx512Bf16.available().then(|| peak(MatrixInstruction::Vdpbf16ps, threads))
}

/// Peak of TDPBSSD with all operands in registers, in 1e9 operations a second; `None` where it is not.
pub fn amx_int8_peak(threads: usize) -> Option<f64> {
    #[cfg(target_arch = "x86_64")]
    if SimdLevel::Amx.available() {
        // SAFETY: the processor has the instruction, and the system lets this process use tiles. An operation has twice the products of
        // TDPBF16PS.
        return Some(2.0 * rate(threads, |_| unsafe { tile_chains!("tdpbssd") }) / 1e9);
    }
    let _ = threads;
    None
}

/// Steps of a call of the chains below, of 96 instructions each.
#[cfg(target_arch = "x86_64")]
const STEPS: usize = 2_000;

/// 24 independent chains of an instruction on 512-bit vectors.
#[cfg(target_arch = "x86_64")]
macro_rules! chains {
    ($instruction:literal) => {
        std::arch::asm!(
            "vpxord zmm24, zmm24, zmm24",
            "vpxord zmm25, zmm25, zmm25",
            ".p2align 5",
            "2:",
            ".rept 4",
            ".irp r, 0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23",
            concat!($instruction, " zmm\\r, zmm24, zmm25"),
            ".endr",
            ".endr",
            "dec {steps}",
            "jnz 2b",
            steps = inout(reg) STEPS => _,
            out("zmm0") _, out("zmm1") _, out("zmm2") _, out("zmm3") _, out("zmm4") _, out("zmm5") _, out("zmm6") _,
            out("zmm7") _, out("zmm8") _, out("zmm9") _, out("zmm10") _, out("zmm11") _, out("zmm12") _, out("zmm13") _,
            out("zmm14") _, out("zmm15") _, out("zmm16") _, out("zmm17") _, out("zmm18") _, out("zmm19") _, out("zmm20") _,
            out("zmm21") _, out("zmm22") _, out("zmm23") _, out("zmm24") _, out("zmm25") _,
            options(nomem, nostack),
        )
    };
}

/// Six independent chains of an instruction on tiles of 16 x 64 bytes; evaluates to the operations of TDPBF16PS, 16 x 16 x 32 products and
/// additions each.
#[cfg(target_arch = "x86_64")]
macro_rules! tile_chains {
    ($instruction:literal) => {{
        let config = Config::new([16; 8]);
        std::arch::asm!(
            "ldtilecfg [{config}]",
            "tilezero tmm6",
            "tilezero tmm7",
            "2:",
            ".rept 16",
            ".irp r, 0,1,2,3,4,5",
            concat!($instruction, " tmm\\r, tmm6, tmm7"),
            ".endr",
            ".endr",
            "dec {steps}",
            "jnz 2b",
            "tilerelease",
            config = in(reg) &config,
            steps = inout(reg) TILE_STEPS => _,
            options(nostack),
        );
        (TILE_STEPS * 96 * 16 * 16 * 64) as f64
    }};
}
#[cfg(target_arch = "x86_64")]
use tile_chains;

/// Steps of a call of the chains of tiles, of 96 instructions each, which take 16 cycles: some hundred microseconds.
#[cfg(target_arch = "x86_64")]
const TILE_STEPS: usize = 200;

/// Operations of a call: 16 products and additions each.
///
/// # Safety
/// The processor has AVX-512.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn fma_chains() -> f64 {
    // SAFETY: touches registers only.
    unsafe { chains!("vfmadd231ps") };
    (STEPS * 96 * 32) as f64
}

/// Operations of a call: 32 products and additions each.
///
/// # Safety
/// The processor has AVX512_BF16.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn bf16_chains() -> f64 {
    // SAFETY: touches registers only.
    unsafe { chains!("vdpbf16ps") };
    (STEPS * 96 * 64) as f64
}

/// Operations of a call: 64 products and additions each.
///
/// # Safety
/// The processor has AVX512_VNNI.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vnni")]
unsafe fn i8_chains() -> f64 {
    // SAFETY: touches registers only.
    unsafe { chains!("vpdpbusd") };
    (STEPS * 96 * 128) as f64
}

/// VPMADDUBSW and an addition of its words to one of 12 chains; operations of a call: 32 products and additions for each.
///
/// # Safety
/// The processor has AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn i8_chains_avx2() -> f64 {
    // SAFETY: touches registers only.
    unsafe {
        std::arch::asm!(
            "vpxor ymm14, ymm14, ymm14",
            "vpxor ymm15, ymm15, ymm15",
            ".p2align 5",
            "2:",
            ".rept 8",
            ".irp r, 0,1,2,3,4,5,6,7,8,9,10,11",
            "vpmaddubsw ymm13, ymm14, ymm15",
            "vpaddw ymm\\r, ymm\\r, ymm13",
            ".endr",
            ".endr",
            "dec {steps}",
            "jnz 2b",
            steps = inout(reg) STEPS => _,
            out("ymm0") _, out("ymm1") _, out("ymm2") _, out("ymm3") _, out("ymm4") _, out("ymm5") _, out("ymm6") _, out("ymm7") _,
            out("ymm8") _, out("ymm9") _, out("ymm10") _, out("ymm11") _, out("ymm12") _, out("ymm13") _, out("ymm14") _, out("ymm15") _,
            options(nomem, nostack),
        );
    }
    (STEPS * 96 * 64) as f64
}

/// Bandwidth of reading a buffer of [`READ_BYTES`], each thread its own part repeatedly from front to back, in GB/s (1e9 bytes).
pub fn read_bandwidth(threads: usize) -> f64 {
    read_bandwidth_of(READ_BYTES, threads)
}

/// As [`read_bandwidth`], of a working set of another size, which may lie in a cache. The memory is that of weights: on huge pages where the
/// system has them.
pub fn read_bandwidth_of(bytes: usize, threads: usize) -> f64 {
    const PIECE: usize = 256 << 10;
    let threads = threads.max(1);
    let words = bytes.max(threads * PIECE) / 4;
    let mut buffer = Buffer::mapped(words).unwrap_or_else(|_| Buffer::zeroed(words));
    buffer.iter_mut().enumerate().for_each(|(i, word)| *word = (i as f32).to_bits()); // Written, so that pages are real.
    let pieces: Vec<&[u32]> = buffer.chunks_exact(PIECE / 4).collect();
    let each = pieces.len() / threads;
    let next: Vec<AtomicUsize> = (0..threads).map(|_| AtomicUsize::new(0)).collect();
    let read = |i: usize| {
        let piece = next[i].fetch_add(1, Ordering::Relaxed) % each;
        level().run(ReadAll(pieces[i * each + piece]))
    };
    rate(threads, read) / 1e9
}

struct ReadAll<'a>(&'a [u32]);

impl Kernel for ReadAll<'_> {
    type Out = f64;

    #[inline(always)]
    fn call<S: Simd>(self, s: S) -> f64 {
        /// Bytes prefetched ahead, as in the kernels: the hardware prefetcher stops at every page.
        const AHEAD: usize = 32 << 10;
        let mut acc = [s.splat(0.0); 4];
        for chunk in self.0.chunks_exact(32) {
            s.prefetch(chunk.as_ptr().wrapping_byte_add(AHEAD));
            s.prefetch(chunk.as_ptr().wrapping_byte_add(AHEAD + 64));
            for (v, acc) in acc.iter_mut().enumerate() {
                // SAFETY: four vectors of eight in a chunk.
                *acc = s.add(*acc, unsafe { s.load(chunk.as_ptr().add(v * 8).cast()) });
            }
        }
        black_box(acc.map(|acc| s.merge(acc)));
        (self.0.len() * 4) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fma_peak_is_a_plausible_number() {
        let peak = fma_peak(1);
        assert!(peak.is_finite() && peak > 0.0, "{peak}");
    }

    #[test]
    fn a_peak_is_that_of_the_instructions_of_the_class() {
        let f32fma = Numerics::F32Fma { weights: baton_types::Dtype::Bf16 };
        let of = [f32fma, Numerics::Bf16x32, Numerics::I8x32].map(MatrixInstruction::of);
        let best = SimdLevel::ALL.into_iter().rev().find(|level| level.available());
        use MatrixInstruction::{Fma, Fma512, Tdpbf16ps, Vdpbf16ps, Vpdpbusd, Vpmaddubsw};
        let want = match best {
            Some(SimdLevel::Amx) => [Fma512, Tdpbf16ps, Vpdpbusd],
            Some(SimdLevel::Avx512Bf16) => [Fma512, Vdpbf16ps, Vpdpbusd],
            Some(SimdLevel::Avx512Vnni) => [Fma512, Fma512, Vpdpbusd],
            Some(SimdLevel::Avx512) => [Fma512, Fma512, Vpmaddubsw],
            Some(SimdLevel::Avx2Fma) => [Fma, Fma, Vpmaddubsw],
            _ => [Fma; 3],
        };
        assert_eq!(of, want, "{best:?}");
        assert_eq!(vdpbf16ps_peak(1).is_some(), SimdLevel::Avx512Bf16.available());
    }
}
