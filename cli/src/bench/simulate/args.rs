//! The command line.

use baton_router::PlacementPolicy;
use clap::Args;
use std::path::PathBuf;
use std::str::FromStr;

/// Arguments of `baton bench --simulate`.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Simulating a trace")]
pub(crate) struct SimulateArgs {
    /// Replay the trace in virtual time on a simulated cluster, without a router.
    #[arg(long, requires = "trace")]
    pub(crate) simulate: bool,
    /// Placement policies to compare: `cost`, `round-robin`, `least-loaded`.
    #[arg(long, value_delimiter = ',', default_value = "cost,round-robin,least-loaded", requires = "simulate")]
    pub(super) policies: Vec<PlacementPolicy>,
    /// Number of simulated prefill workers.
    #[arg(long, default_value_t = 8, requires = "simulate", value_parser = clap::value_parser!(u16).range(1..=512))]
    pub(super) prefill: u16,
    /// Number of simulated decode workers.
    #[arg(long, default_value_t = 8, requires = "simulate", value_parser = clap::value_parser!(u16).range(1..=512))]
    pub(super) decode: u16,
    /// Sizes of the KV pools, simulated one after another: `all` (room for every block of the trace), `rates` (the size in the file of
    /// rates), a share of the trace's distinct blocks such as `0.5%`, or a number of blocks.
    #[arg(long, value_delimiter = ',', default_value = "all,0.5%", requires = "simulate")]
    pub(super) pools: Vec<PoolSize>,
    /// Pool size of decode workers, if it differs from --pools.
    #[arg(long, requires = "simulate")]
    pub(super) decode_pools: Option<PoolSize>,
    /// Seconds after which an unused cached block is evicted; by default it stays cached for the whole trace.
    #[arg(long, requires = "simulate")]
    pub(super) ttl_s: Option<u64>,
    /// Prefill workers do not get cached KV from decode workers.
    #[arg(long, requires = "simulate")]
    pub(super) no_gets: bool,
    /// File with the rates of workers; by default a built-in one.
    #[arg(long, value_name = "FILE", requires = "simulate")]
    pub(super) rates: Option<PathBuf>,
}

impl SimulateArgs {
    /// Number of simulations requested.
    pub(crate) fn runs(&self) -> usize {
        self.policies.len() * self.pools.len()
    }
}

/// Size of a pool.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum PoolSize {
    /// Room for all blocks of the trace, and for running requests.
    All,
    /// As the file of rates says.
    Rates,
    /// A share of the trace's distinct blocks.
    Share(f64),
    /// This many blocks of the trace's size.
    Blocks(u32),
}

impl FromStr for PoolSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let share = |percent: &str| percent.parse().ok().filter(|p| (0.0..=100.0).contains(p)).map(|p: f64| p / 100.0);
        let size = match (text, text.strip_suffix('%')) {
            ("all", _) => Some(Self::All),
            ("rates", _) => Some(Self::Rates),
            (_, Some(percent)) => share(percent).map(Self::Share),
            (blocks, None) => blocks.parse().ok().filter(|blocks| *blocks > 0).map(Self::Blocks),
        };
        size.ok_or_else(|| format!("{text:?} is neither all, rates, a share such as 0.5%, nor a number of blocks"))
    }
}

impl std::fmt::Display for PoolSize {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::All => f.write_str("room for everything"),
            Self::Rates => f.write_str("pools as in the rates"),
            Self::Share(share) => write!(f, "{}% of the different blocks", share * 100.0),
            Self::Blocks(blocks) => write!(f, "{blocks} blocks"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read() {
        let read = |text: &str| text.parse::<PoolSize>();
        assert_eq!(read("all"), Ok(PoolSize::All));
        assert_eq!(read("0.5%"), Ok(PoolSize::Share(0.005)));
        assert_eq!(read("914"), Ok(PoolSize::Blocks(914)));
        for wrong in ["", "0", "-1", "120%", "x%", "some"] {
            assert!(read(wrong).unwrap_err().contains("0.5%"), "{wrong}");
        }
    }
}
