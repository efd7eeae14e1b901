//! The sixteen features of a panel as vectors: two of eight lanes, or one of AVX-512.

use crate::cpu::SimdLevel;
#[cfg(target_arch = "x86_64")]
use crate::cpu::simd::{Avx2, Sixteen};
use crate::cpu::simd::{Kernel, LANES, Portable, Simd};
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

/// Code to compile for each kind of vectors.
pub(in crate::cpu::f32fma) trait Work {
    /// The code; `#[inline(always)]` in every implementation.
    fn call<V: Vectors>(self, vectors: V);
}

/// Tiles of a size that is known to the compiler.
pub(in crate::cpu::f32fma) trait Sizes {
    /// `R` rows and `P` panels.
    fn tile<const R: usize, const P: usize>(self);
}

/// Sixteen f32, one for each feature of a panel. Every arithmetic operation rounds once, to nearest even.
///
/// A value of the type proves that its instructions exist.
pub(in crate::cpu::f32fma) trait Vectors: Copy {
    type F: Copy;
    /// Most rows of a tile: their sums, a panel's weights and an element of x have the registers to themselves.
    const ROWS_MAX: usize;
    /// Most rows times panels of tiles that have registers for the weights of two steps.
    const PAIRED_MAX: usize;

    /// Runs `work` compiled for these vectors.
    fn run<W: Work>(self, work: W);
    /// Panels that pass together over this many rows: with few rows, chains of several hide the latency of an addition.
    fn panels(rows: usize) -> usize;
    /// The tile of `height` rows and `panels` panels, which are 1 or those of [`Vectors::panels`].
    fn pick<S: Sizes>(height: usize, panels: usize, sizes: S);

    fn zero(self) -> Self::F;
    /// # Safety
    /// `from` is readable for sixteen f32, with any alignment.
    unsafe fn load(self, from: *const f32) -> Self::F;
    /// Widens eight words of two bf16: the low halves, then the high halves.
    /// # Safety
    /// `from` is readable for eight u32, aligned to 32 bytes.
    unsafe fn load_bf16_pairs(self, from: *const u32) -> Self::F;
    /// # Safety
    /// `to` is writable for sixteen f32, with any alignment.
    unsafe fn store(self, to: *mut f32, x: Self::F);
    /// Hints that the cache line at this address will be read. Any address is allowed.
    fn prefetch<T>(self, at: *const T);
    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    /// `x * w + acc` with one rounding.
    fn fma(self, x: f32, w: Self::F, acc: Self::F) -> Self::F;
}

/// Two vectors of eight.
#[derive(Clone, Copy)]
struct Halves<S>(S);

/// Work as a kernel over vectors of eight.
struct OnHalves<W>(W);

impl<W: Work> Kernel for OnHalves<W> {
    type Out = ();

    #[inline(always)]
    fn call<S: Simd>(self, simd: S) {
        self.0.call(Halves(simd));
    }
}

impl<S: Simd> Vectors for Halves<S> {
    type F = [S::F; 2];
    // 6 x 2 sums leave room for two vectors of weights and a broadcast in 16 registers.
    const ROWS_MAX: usize = 6;
    const PAIRED_MAX: usize = 4;

    fn run<W: Work>(self, work: W) {
        self.0.run(OnHalves(work));
    }
    #[inline(always)]
    fn panels(rows: usize) -> usize {
        match rows {
            1 => 4,
            2 => 2,
            // Taller tiles have enough chains, and no registers for a second panel.
            _ => 1,
        }
    }
    #[inline(always)]
    fn pick<Z: Sizes>(height: usize, panels: usize, sizes: Z) {
        match (height, panels) {
            (1, 1) => sizes.tile::<1, 1>(),
            (1, _) => sizes.tile::<1, 4>(),
            (2, 1) => sizes.tile::<2, 1>(),
            (2, _) => sizes.tile::<2, 2>(),
            (3, _) => sizes.tile::<3, 1>(),
            (4, _) => sizes.tile::<4, 1>(),
            (5, _) => sizes.tile::<5, 1>(),
            _ => sizes.tile::<6, 1>(),
        }
    }

    #[inline(always)]
    fn zero(self) -> Self::F {
        [self.0.splat(0.0); 2]
    }
    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> Self::F {
        // SAFETY: the caller's promise.
        unsafe { [self.0.load(from), self.0.load(from.add(LANES))] }
    }
    #[inline(always)]
    unsafe fn load_bf16_pairs(self, from: *const u32) -> Self::F {
        // SAFETY: the caller's promise.
        unsafe { self.0.load_bf16_pairs(from) }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32, x: Self::F) {
        // SAFETY: the caller's promise.
        unsafe {
            self.0.store(to, x[0]);
            self.0.store(to.add(LANES), x[1]);
        }
    }
    #[inline(always)]
    fn prefetch<T>(self, at: *const T) {
        self.0.prefetch(at);
    }
    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        [self.0.add(a[0], b[0]), self.0.add(a[1], b[1])]
    }
    #[inline(always)]
    fn fma(self, x: f32, w: Self::F, acc: Self::F) -> Self::F {
        let x = self.0.splat(x);
        [self.0.fma(x, w[0], acc[0]), self.0.fma(x, w[1], acc[1])]
    }
}

/// Intrinsics that touch no memory.
#[cfg(target_arch = "x86_64")]
macro_rules! op {
    ($x:expr) => {
        // SAFETY: a `Sixteen` exists, so the processor has the instructions.
        unsafe { $x }
    };
}

#[cfg(target_arch = "x86_64")]
impl Vectors for Sixteen {
    type F = __m512;
    // 12 x 2 sums leave room for two vectors of weights, those of the next step and a broadcast in 32 registers.
    const ROWS_MAX: usize = 12;
    const PAIRED_MAX: usize = 16;

    fn run<W: Work>(self, work: W) {
        /// Never inlined, as [`Simd::run`].
        #[inline(never)]
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
        fn with_features<W: Work>(vectors: Sixteen, work: W) {
            work.call(vectors);
        }
        op!(with_features(self, work));
    }
    #[inline(always)]
    fn panels(rows: usize) -> usize {
        match rows {
            1 => 8,
            2 => 4,
            _ => 2,
        }
    }
    #[inline(always)]
    fn pick<Z: Sizes>(height: usize, panels: usize, sizes: Z) {
        match (height, panels) {
            (1, 1) => sizes.tile::<1, 1>(),
            (1, _) => sizes.tile::<1, 8>(),
            (2, 1) => sizes.tile::<2, 1>(),
            (2, _) => sizes.tile::<2, 4>(),
            (3, 1) => sizes.tile::<3, 1>(),
            (3, _) => sizes.tile::<3, 2>(),
            (4, 1) => sizes.tile::<4, 1>(),
            (4, _) => sizes.tile::<4, 2>(),
            (5, 1) => sizes.tile::<5, 1>(),
            (5, _) => sizes.tile::<5, 2>(),
            (6, 1) => sizes.tile::<6, 1>(),
            (6, _) => sizes.tile::<6, 2>(),
            (7, 1) => sizes.tile::<7, 1>(),
            (7, _) => sizes.tile::<7, 2>(),
            (8, 1) => sizes.tile::<8, 1>(),
            (8, _) => sizes.tile::<8, 2>(),
            (9, 1) => sizes.tile::<9, 1>(),
            (9, _) => sizes.tile::<9, 2>(),
            (10, 1) => sizes.tile::<10, 1>(),
            (10, _) => sizes.tile::<10, 2>(),
            (11, 1) => sizes.tile::<11, 1>(),
            (11, _) => sizes.tile::<11, 2>(),
            (_, 1) => sizes.tile::<12, 1>(),
            _ => sizes.tile::<12, 2>(),
        }
    }

    #[inline(always)]
    fn zero(self) -> __m512 {
        op!(_mm512_setzero_ps())
    }
    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe { _mm512_loadu_ps(from) }
    }
    #[inline(always)]
    unsafe fn load_bf16_pairs(self, from: *const u32) -> __m512 {
        // SAFETY: the caller's promise.
        let words = unsafe { _mm256_load_si256(from.cast()) };
        op!({
            let by = _mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 16, 16, 16, 16, 16, 16, 16, 16);
            let shifted = _mm512_sllv_epi32(_mm512_broadcast_i64x4(words), by);
            _mm512_castsi512_ps(_mm512_and_si512(shifted, _mm512_set1_epi32(0xffff_0000_u32 as i32)))
        })
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32, x: __m512) {
        // SAFETY: the caller's promise.
        unsafe { _mm512_storeu_ps(to, x) }
    }
    #[inline(always)]
    fn prefetch<T>(self, at: *const T) {
        op!(_mm_prefetch::<_MM_HINT_T1>(at.cast()))
    }
    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        op!(_mm512_add_ps(a, b))
    }
    #[inline(always)]
    fn fma(self, x: f32, w: __m512, acc: __m512) -> __m512 {
        op!(_mm512_fmadd_ps(_mm512_set1_ps(x), w, acc))
    }
}

#[derive(Clone, Copy)]
enum Kind {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2),
    #[cfg(target_arch = "x86_64")]
    Avx512(Sixteen),
}

/// The vectors of a level, for products of class `f32fma`.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct PanelVectors(Kind);

impl PanelVectors {
    /// The widest vectors of a level, if this processor has them.
    pub(in crate::cpu) fn of(level: SimdLevel) -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            if level >= SimdLevel::Avx512
                && let Some(sixteen) = Sixteen::detect()
            {
                return Self(Kind::Avx512(sixteen));
            }
            if level >= SimdLevel::Avx2Fma
                && let Some(avx2) = Avx2::detect()
            {
                return Self(Kind::Avx2(avx2));
            }
        }
        let _ = level;
        Self(Kind::Portable)
    }

    /// Most rows of a tile.
    pub(in crate::cpu) fn rows_max(self) -> usize {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512(_) => Sixteen::ROWS_MAX,
            _ => Halves::<Portable>::ROWS_MAX,
        }
    }

    /// Runs `work` compiled for these vectors.
    pub(super) fn run<W: Work>(self, work: W) {
        match self.0 {
            Kind::Portable => Halves(Portable).run(work),
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2(avx2) => Halves(avx2).run(work),
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512(sixteen) => sixteen.run(work),
        }
    }
}
