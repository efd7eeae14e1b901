//! Tiles: permission to use them, and their shapes.
//!
//! The state of tiles is 8 KiB of every thread, which Linux saves only for processes that ask for it (`Documentation/arch/x86/xstate.rst`).

use std::arch::x86_64::__cpuid_count;
use std::sync::OnceLock;

/// `arch_prctl` code that asks for a component of the extended state.
const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
/// Number of the component of tile data.
const XFEATURE_XTILEDATA: libc::c_long = 18;
/// Bits of CPUID leaf 7, register EDX: AMX-BF16, AMX-TILE and AMX-INT8.
const AMX_BITS: u32 = 1 << 22 | 1 << 24 | 1 << 25;

/// Whether the processor has TDPBF16PS and TDPBSSD, and the system lets this process use it; asked once.
pub(super) fn usable() -> bool {
    static USABLE: OnceLock<bool> = OnceLock::new();
    *USABLE.get_or_init(|| {
        let leaf = __cpuid_count(7, 0);
        // SAFETY: takes two numbers; allows this process more state, or fails.
        let allowed = || unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) } == 0;
        cfg!(target_os = "linux") && leaf.edx & AMX_BITS == AMX_BITS && allowed()
    })
}

/// Operand of LDTILECFG.
#[repr(C, align(64))]
pub(super) struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    /// Bytes of a row of each register.
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl Config {
    /// For registers of so many rows of 64 bytes, from register 0 on; those of no rows are not used.
    pub(super) fn new(rows_of: impl IntoIterator<Item = u8>) -> Self {
        Self::of(rows_of.into_iter().map(|rows| (rows, 64)))
    }

    /// For registers of so many rows of so many bytes.
    pub(super) fn of(registers: impl IntoIterator<Item = (u8, u16)>) -> Self {
        let mut config = Self { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
        for (register, of) in registers.into_iter().enumerate().filter(|(_, (rows, _))| *rows > 0) {
            (config.rows[register], config.row_bytes[register]) = of;
        }
        config
    }
}

/// Whether this thread has tiles that the system must save: bit 18 of XGETBV(1) (Intel's manual, volume 1, 13.6).
#[cfg(test)]
pub(super) fn tiles_in_use() -> bool {
    let in_use: u32;
    // SAFETY: reads a register; a processor with tiles has the instruction and this argument.
    unsafe {
        std::arch::asm!("xgetbv", in("ecx") 1, out("eax") in_use, out("edx") _, options(nomem, nostack, preserves_flags));
    }
    in_use >> XFEATURE_XTILEDATA & 1 == 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::SimdLevel;
    use baton_skips::{Need, skipped};
    use std::arch::asm;

    #[test]
    fn tiles_are_in_use_until_they_are_released() {
        if !SimdLevel::Amx.available() {
            return skipped(Need::Amx, "tiles in use", "the processor has no AMX");
        }
        let (config, row) = (Config::new([1]), [1u8; 64]);
        // SAFETY: a valid configuration, and one row of 64 bytes. The compiler uses no tile registers.
        unsafe {
            asm!(
                "ldtilecfg [{config}]",
                "tileloadd tmm0, [{row} + {stride}]",
                config = in(reg) &config,
                row = in(reg) &row,
                stride = in(reg) 0usize,
                options(nostack, readonly, preserves_flags),
            );
        }
        assert!(tiles_in_use());
        // SAFETY: the processor has the instruction.
        unsafe { asm!("tilerelease", options(nomem, nostack, preserves_flags)) };
        assert!(!tiles_in_use());
    }
}
