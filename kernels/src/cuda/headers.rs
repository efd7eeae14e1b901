//! The headers of the kernels' arguments, generated from the host's structs.

use super::arguments::{Declaration, known, model, pool, sampling};
use super::known::OPERATIONS;

/// Path below `kernels/cu/params` and text of every generated header.
pub fn headers() -> Vec<(&'static str, String)> {
    let header = |intro: &str, constants: String, declarations: Vec<Declaration>| {
        let structs: String = declarations.iter().map(Declaration::text).collect();
        let constants = if constants.is_empty() { constants } else { format!("{constants}\n") };
        let from = "// Generated from kernels/src/cuda/arguments: change it there.";
        format!(
            "// {intro}\n//\n{from}\n#pragma once\n\n#include \"../types.cuh\"\n\n{constants}{}\n",
            structs.trim_end()
        )
    };
    vec![
        ("known.h", header(known::INTRO, known_operations(), known::declarations())),
        ("model.h", header(model::INTRO, model::constants(), model::declarations())),
        ("pool.h", header(pool::INTRO, String::new(), pool::declarations())),
        ("sampling.h", header(sampling::INTRO, sampling::constants(), sampling::declarations())),
    ]
}

/// Operations of known answers, by number.
fn known_operations() -> String {
    let names = OPERATIONS.iter().enumerate();
    let lines: String = names.map(|(i, op)| format!("    KNOWN_{} = {i},\n", op.name.to_uppercase())).collect();
    format!("enum KnownOperation {{\n{lines}}};\n")
}
