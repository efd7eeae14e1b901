//! What a kernel needs of a multiprocessor: the compiler's log, and the committed budgets.

use anyhow::{Context, ensure};
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// Of one thread, and of one CTA.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Usage {
    pub(super) registers: u32,
    /// Bytes of shared memory that the kernel declares; what a launch adds is not in it.
    pub(super) shared: u32,
    /// Bytes of spilled registers, stored and loaded.
    pub(super) spills: u32,
}

impl Usage {
    pub(super) fn max(self, other: Self) -> Self {
        Self {
            registers: self.registers.max(other.registers),
            shared: self.shared.max(other.shared),
            spills: self.spills.max(other.spills),
        }
    }
}

/// The kernels of a log of `--ptxas-options=-v`, by name.
///
/// # Errors
/// If a line is not as expected: spills must never be overlooked.
pub(super) fn of_log(log: &str) -> anyhow::Result<BTreeMap<String, Usage>> {
    let mut found = BTreeMap::new();
    // The kernel whose lines these are, with its spills once a line has said them.
    let mut kernel: Option<(String, Option<u32>)> = None;
    for line in log.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            ensure!(kernel.is_none(), "a kernel without registers before: {line}");
            kernel = Some((rest.split('\'').next().unwrap_or_default().to_owned(), None));
        } else if line.contains("bytes spill stores") {
            let number = |what| number_before(line, what).with_context(|| line.to_owned());
            let bytes = number(" bytes spill stores")? + number(" bytes spill loads")?;
            match &mut kernel {
                // Functions that it calls count with it.
                Some((_, spills)) => *spills = Some(spills.unwrap_or(0) + bytes),
                None => ensure!(bytes == 0, "a function spills: {line}"),
            }
        } else if line.contains("Used ") && line.contains(" registers") {
            let (name, spills) = kernel.take().with_context(|| format!("registers of no kernel: {line}"))?;
            let spills = spills.with_context(|| format!("{name}: the log does not say whether it spills"))?;
            let registers = number_before(line, " registers").with_context(|| line.to_owned())?;
            let shared = number_before(line, " bytes smem").unwrap_or(0);
            found.insert(name, Usage { registers, shared, spills });
        }
    }
    ensure!(kernel.is_none(), "the log ends within a kernel");
    ensure!(!found.is_empty(), "the log names no kernel:\n{log}");
    Ok(found)
}

/// The number that stands before these words.
fn number_before(line: &str, words: &str) -> Option<u32> {
    line.split_once(words)?.0.rsplit([' ', ',']).next()?.parse().ok()
}

/// Most registers and shared memory of each kernel, over all targets.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Budgets(pub(super) BTreeMap<String, Usage>);

const HEAD: &str = "# The most that a kernel takes on any target: registers of a thread, bytes of shared memory that it declares.\n\
    # `cargo xtask cubins` refuses more, and any spill. UPDATE_EXPECT=1 writes this file.\n";

impl Budgets {
    pub(super) fn parse(text: &str) -> anyhow::Result<Self> {
        let mut budgets = BTreeMap::new();
        for line in text.lines().filter(|line| !line.starts_with('#') && !line.trim().is_empty()) {
            let words: Vec<&str> = line.split_whitespace().collect();
            let [name, registers, shared] = words[..] else { anyhow::bail!("not a kernel and two numbers: {line}") };
            let usage = Usage { registers: registers.parse()?, shared: shared.parse()?, spills: 0 };
            ensure!(budgets.insert(name.to_owned(), usage).is_none(), "{name} is there twice");
        }
        Ok(Self(budgets))
    }

    pub(super) fn text(&self) -> String {
        let mut text = HEAD.to_owned();
        for (name, usage) in &self.0 {
            _ = writeln!(text, "{name:<24} {:>4} {:>6}", usage.registers, usage.shared);
        }
        text
    }

    /// Kernels over their budget, or without one. With `all`, also budgets without a kernel.
    pub(super) fn exceeded(&self, used: &BTreeMap<String, Usage>, all: bool) -> Vec<String> {
        let mut found = Vec::new();
        for (name, usage) in used {
            match self.0.get(name) {
                None => found.push(format!("{name} has no budget")),
                Some(most) if usage.registers > most.registers || usage.shared > most.shared => found.push(format!(
                    "{name} takes {} registers and {} bytes of shared memory; its budget is {} and {}",
                    usage.registers, usage.shared, most.registers, most.shared
                )),
                Some(_) => {}
            }
        }
        let gone = self.0.keys().filter(|name| all && !used.contains_key(*name));
        found.extend(gone.map(|name| format!("{name} has a budget and is no kernel")));
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "ptxas info    : 0 bytes gmem\n\
        ptxas info    : Compiling entry function 'sample' for 'sm_90a'\n\
        ptxas info    : Function properties for sample\n    \
        0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
        ptxas info    : Used 64 registers, used 1 barriers, 20264 bytes smem\n\
        ptxas info    : Compile time = 0.000 ms\n\
        ptxas info    : Compiling entry function 'copy' for 'sm_90a'\n    \
        16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads\n\
        ptxas info    : Used 32 registers, 352 bytes cmem[0]\n";

    #[test]
    fn a_log_is_read() {
        let found = of_log(LOG).unwrap();
        assert_eq!(found["sample"], Usage { registers: 64, shared: 20_264, spills: 0 });
        assert_eq!(found["copy"], Usage { registers: 32, shared: 0, spills: 20 });
        let called = LOG.replace(
            "ptxas info    : Used 64",
            "ptxas info    : Function properties for f\n    8 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads\n\
             ptxas info    : Used 64",
        );
        assert_eq!(of_log(&called).unwrap()["sample"].spills, 8);
        assert!(of_log("").is_err() && of_log(&LOG.replace("0 bytes spill stores, 0", "no")).is_err());
    }

    #[test]
    fn a_kernel_over_its_budget_is_found() {
        let used = of_log(LOG).unwrap();
        let budgets = Budgets::parse("# head\nsample 64 20264\ncopy 40 0\n").unwrap();
        assert_eq!(budgets.exceeded(&used, true), [""; 0]);
        assert_eq!(Budgets::parse(&budgets.text()).unwrap(), budgets);
        for (text, all, wrong) in [
            ("sample 63 20264\ncopy 40 0\n", true, 1),
            ("sample 64 20263\ncopy 40 0\n", true, 1),
            ("sample 64 20264\n", true, 1),
            ("sample 64 20264\ncopy 40 0\nold 1 1\n", true, 1),
            ("sample 64 20264\ncopy 40 0\nold 1 1\n", false, 0),
        ] {
            assert_eq!(Budgets::parse(text).unwrap().exceeded(&used, all).len(), wrong, "{text}");
        }
        assert!(Budgets::parse("a 1\n").is_err() && Budgets::parse("a 1 1\na 1 1\n").is_err());
    }
}
