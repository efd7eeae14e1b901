//! The simulation contains the environment of the product's decision code and no second copy of it: it must define no state machine.

use super::Source;
use super::clocks::PURE;
use std::collections::HashSet;

const SIMULATION: &str = "simulation/";
/// Suffixes of names of states.
const STATES: &[&str] = &["State", "Phase", "Stage"];

/// Refuses enums of states, and types with the same name as a type of a pure core.
pub(super) fn check(sources: &[Source]) -> Vec<String> {
    let core = |s: &&Source| s.is_product_code() && PURE.iter().any(|core| s.path.starts_with(core));
    let cores: HashSet<&str> = sources.iter().filter(core).flat_map(types).map(|(_, _, name)| name).collect();
    let mut found = Vec::new();
    for source in sources.iter().filter(|s| s.path.starts_with(SIMULATION)) {
        for (line, kind, name) in types(source) {
            if kind == "enum" && STATES.iter().any(|state| name.ends_with(state)) {
                found.push(format!("{}:{line}: `{name}`: states belong to the shipped cores", source.path));
            }
            if cores.contains(name) {
                found.push(format!("{}:{line}: `{name}` is a type of a shipped core: drive that one", source.path));
            }
        }
    }
    found
}

/// Line, kind and name of each type that a file defines in product code.
fn types(source: &Source) -> impl Iterator<Item = (usize, &'static str, &str)> {
    source.product_lines().filter_map(|(line, text)| {
        let text = text.trim_start();
        let code = ["pub ", "pub(crate) ", "pub(super) "].iter().find_map(|v| text.strip_prefix(v)).unwrap_or(text);
        let (kind, rest) =
            ["enum", "struct"].into_iter().find_map(|k| Some((k, code.strip_prefix(k)?.strip_prefix(' ')?)))?;
        let end = rest.find(|c: char| c != '_' && !c.is_alphanumeric()).unwrap_or(rest.len());
        Some((line, kind, &rest[..end]))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_state_machine_is_found() {
        let source = |path: &str, text: &str| Source { path: path.into(), text: text.into() };
        let core = source("engine/src/scheduler/mod.rs", "pub(crate) struct Scheduler<T> {}\nenum Phase {}");
        let found = |text: &str| check(&[core.clone(), source("simulation/src/worker.rs", text)]);
        assert_eq!(found("enum LaneState {\n}").len(), 1);
        assert_eq!(found("pub(crate) struct Scheduler {\n}").len(), 1);
        assert_eq!(found("pub enum Phase { A }").len(), 2);
        assert_eq!(found("struct Lane;\nenum Event { Arrives }\nuse baton_engine::Scheduler;"), [""; 0]);
        assert_eq!(check(&[core.clone(), source("tests/src/a.rs", "enum LaneState {}")]), [""; 0]);
    }
}
