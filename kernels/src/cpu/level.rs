//! Instruction sets.

#[cfg(target_arch = "x86_64")]
use crate::cpu::amx;
use crate::cpu::known;
use crate::device::DeviceError;

/// The instructions to use. The bits do not depend on them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SimdLevel {
    /// The packing and the shapes of [`SimdLevel::Amx`] over scalar instructions: for tests, on any CPU. Those of attention need AVX-512;
    /// elsewhere it is plain Rust.
    AmxScalar,
    /// Plain Rust, for any CPU.
    Portable,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2Fma,
    /// x86-64 with AVX-512 F, BW, DQ and VL.
    Avx512,
    /// The same with AVX512_VNNI (VPDPBUSD).
    Avx512Vnni,
    /// The same with AVX512_BF16 (VDPBF16PS).
    Avx512Bf16,
    /// The same with AMX_TILE, AMX_BF16 (TDPBF16PS) and AMX_INT8 (TDPBSSD), where the system lets this process use tiles.
    Amx,
}

impl SimdLevel {
    /// All levels, the best last.
    pub const ALL: [Self; 7] =
        [Self::AmxScalar, Self::Portable, Self::Avx2Fma, Self::Avx512, Self::Avx512Vnni, Self::Avx512Bf16, Self::Amx];

    /// Whether this processor says that it has the instructions.
    pub fn available(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        let has = {
            let avx2 = || {
                is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
            };
            let vnni = || is_x86_feature_detected!("avx512vnni");
            let avx512 = || {
                is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            };
            let bf16 = || avx2() && avx512() && vnni() && is_x86_feature_detected!("avx512bf16");
            match self {
                Self::AmxScalar | Self::Portable => true,
                Self::Avx2Fma => avx2(),
                Self::Avx512 => avx2() && avx512(),
                Self::Avx512Vnni => avx2() && avx512() && vnni(),
                Self::Avx512Bf16 => bf16(),
                Self::Amx => bf16() && amx::usable(),
            }
        };
        #[cfg(not(target_arch = "x86_64"))]
        let has = self <= Self::Portable;
        has
    }

    /// The best level of this machine whose known answers are right: what differs from them is not used.
    ///
    /// # Errors
    /// If there is no memory for the operands of known answers, or if plain Rust is wrong too.
    pub fn detect() -> Result<Self, DeviceError> {
        Self::best(known::wrong)
    }

    fn best(wrong: impl Fn(Self) -> Result<Option<&'static str>, DeviceError>) -> Result<Self, DeviceError> {
        for level in Self::ALL.into_iter().rev().filter(|level| *level >= Self::Portable && level.available()) {
            if wrong(level)?.is_none() {
                return Ok(level);
            }
        }
        Err(DeviceError::Failed("no instructions of this processor give the known answers".into()))
    }

    /// Refuses a level that the processor lacks, or whose known answers are wrong.
    pub(super) fn checked(self) -> Result<Self, DeviceError> {
        if !self.available() {
            return Err(DeviceError::Failed(format!("this processor has no {}", self.name())));
        }
        match known::wrong(self)? {
            None => Ok(self),
            Some(of) => Err(DeviceError::Failed(format!("{} does not give the known answers of {of}", self.name()))),
        }
    }

    /// For messages.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::AmxScalar => "scalar amx",
            Self::Portable => "portable",
            Self::Avx2Fma => "avx2+fma",
            Self::Avx512 => "avx512",
            Self::Avx512Vnni => "avx512+vnni",
            Self::Avx512Bf16 => "avx512+vnni+bf16",
            Self::Amx => "avx512+vnni+bf16+amx",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_skips::{Need, skipped};

    #[test]
    fn the_best_level_of_the_processor_is_used() {
        for (level, need) in
            [(SimdLevel::Avx2Fma, Need::Avx2), (SimdLevel::Avx512Bf16, Need::Avx512), (SimdLevel::Amx, Need::Amx)]
        {
            if !level.available() {
                skipped(need, "known answers of an instruction set", format!("the processor has no {level:?}"));
            }
        }
        let best = SimdLevel::ALL.into_iter().rev().find(|level| level.available());
        assert_eq!(SimdLevel::detect().ok(), best, "known answers of the best level are wrong");
    }

    #[test]
    fn a_level_that_is_wrong_is_not_used() {
        let available = || SimdLevel::ALL.into_iter().rev().filter(|level| level.available());
        for wrong in available() {
            let best = SimdLevel::best(|level| Ok((level >= wrong).then_some("products")));
            let next = available().find(|level| *level < wrong && *level >= SimdLevel::Portable);
            assert_eq!(best.ok(), next, "{wrong:?}");
        }
    }

    #[test]
    fn a_level_of_which_nothing_is_known_is_an_error() {
        let error = DeviceError::Failed("no memory".into());
        assert_eq!(SimdLevel::best(|_| Err(error.clone())), Err(error));
    }
}
