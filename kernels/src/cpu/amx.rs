//! Tiles: permission to use them, their shapes, and their release.
//!
//! The state of tiles is 8 KiB of every thread, which Linux saves only for processes that ask for it (`Documentation/arch/x86/xstate.rst`).

use std::arch::asm;
use std::arch::x86_64::__cpuid_count;
use std::marker::PhantomData;
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

/// Configured tiles of this thread. They are released when this is dropped, so that the system need not save them.
pub(super) struct Configured(PhantomData<*const ()>);

impl Configured {
    /// # Safety
    /// The processor has tiles, and nothing else on this thread uses them while this exists.
    pub(super) unsafe fn new(config: &Config) -> Self {
        let mut configured = Self(PhantomData);
        configured.change(config);
        configured
    }

    /// Other shapes; all registers become zero.
    pub(super) fn change(&mut self, config: &Config) {
        // SAFETY: a valid configuration; the promise of `new`. The compiler uses no tile registers.
        unsafe { asm!("ldtilecfg [{}]", in(reg) config, options(nostack, readonly, preserves_flags)) };
    }
}

impl Drop for Configured {
    fn drop(&mut self) {
        // SAFETY: the processor has the instruction, by the promise of `new`.
        unsafe { asm!("tilerelease", options(nomem, nostack, preserves_flags)) };
    }
}

/// Whether this thread has tiles that the system must save: bit 18 of XGETBV(1) (Intel's manual, volume 1, 13.6).
#[cfg(test)]
pub(super) fn tiles_in_use() -> bool {
    let in_use: u32;
    // SAFETY: reads a register; a processor with tiles has the instruction and this argument.
    unsafe {
        asm!("xgetbv", in("ecx") 1, out("eax") in_use, out("edx") _, options(nomem, nostack, preserves_flags));
    }
    in_use >> XFEATURE_XTILEDATA & 1 == 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::SimdLevel;
    use baton_skips::{Need, skipped};

    #[test]
    fn tiles_are_in_use_until_they_are_released() {
        if !SimdLevel::Amx.available() {
            return skipped(Need::Amx, "tiles in use", "the processor has no AMX");
        }
        // SAFETY: the processor has tiles; nothing else uses them here.
        let configured = unsafe { Configured::new(&Config::new([1])) };
        let row = [1u8; 64];
        // SAFETY: one row of 64 bytes. The compiler uses no tile registers.
        unsafe {
            asm!(
                "tileloadd tmm0, [{row} + {stride}]",
                row = in(reg) &row,
                stride = in(reg) 0usize,
                options(nostack, readonly, preserves_flags),
            );
        }
        assert!(tiles_in_use());
        drop(configured);
        assert!(!tiles_in_use());
    }
}
