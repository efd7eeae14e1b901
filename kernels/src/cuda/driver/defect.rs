//! Defects that are put into kernels on purpose: a check of a GPU must see each of them.

use std::fmt;
use std::str::FromStr;

/// What is wrong with a kernel. `cargo xtask cubins --defects` compiles the same into cubins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SeededDefect {
    /// A norm reads the sums of other warps before they are there. The twin has no threads: only a race detector sees it.
    Barrier,
    /// Products of few rows leave out the columns behind the last whole stage.
    Tail,
    /// Decode attention weighs with half the factor.
    Scale,
    /// Keys and values are stored as if a block had half its tokens.
    BlockIndex,
    /// The last values of the activation are not stored.
    Unwritten,
}

impl SeededDefect {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Barrier, Self::Tail, Self::Scale, Self::BlockIndex, Self::Unwritten];

    /// Kernels whose results it changes, as their names begin.
    pub fn kernel(self) -> &'static str {
        match self {
            Self::Barrier => "norm",
            Self::Tail => "gemm_few",
            Self::Scale => "attend_decode",
            Self::BlockIndex => "rope_store",
            Self::Unwritten => "silu_mul",
        }
    }
}

impl fmt::Display for SeededDefect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Barrier => "barrier",
            Self::Tail => "tail",
            Self::Scale => "scale",
            Self::BlockIndex => "block-index",
            Self::Unwritten => "unwritten",
        })
    }
}

impl FromStr for SeededDefect {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|defect| defect.to_string() == name);
        found.ok_or_else(|| format!("{name} is none of {}", Self::ALL.map(|defect| defect.to_string()).join(", ")))
    }
}
