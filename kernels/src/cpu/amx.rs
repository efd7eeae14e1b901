//! Permission to use tiles.
//!
//! The state of tiles is 8 KiB of every thread, which Linux saves only for processes that ask for it (`Documentation/arch/x86/xstate.rst`).

use std::arch::x86_64::__cpuid_count;
use std::sync::OnceLock;

/// `arch_prctl` code that asks for a component of the extended state.
const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
/// Number of the component of tile data.
const XFEATURE_XTILEDATA: libc::c_long = 18;
/// Bits of CPUID leaf 7, register EDX: AMX-BF16 and AMX-TILE.
const AMX_BITS: u32 = 1 << 22 | 1 << 24;

/// Whether the processor has TDPBF16PS and the system lets this process use it; asked once.
pub(super) fn usable() -> bool {
    static USABLE: OnceLock<bool> = OnceLock::new();
    *USABLE.get_or_init(|| {
        let leaf = __cpuid_count(7, 0);
        // SAFETY: takes two numbers; allows this process more state, or fails.
        let allowed = || unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) } == 0;
        cfg!(target_os = "linux") && leaf.edx & AMX_BITS == AMX_BITS && allowed()
    })
}
