//! A short form of `make chaos`, and the table that it works through. See `baton_tests::chaos`.

use anyhow::{Context, ensure};
use baton_tests::chaos::matrix::rendered;
use baton_tests::chaos::{ActPlan, Plan, run};
use baton_tests::load::Case;
use expect_test::expect_file;
use std::time::Duration;

const MODEL: &str = "random:hidden=256,layers=4,heads=4,kv_heads=2,vocab=500,context=1024,seed=13";
/// Fixed, so that every `make test` tries the same.
const SEED: u64 = 5;
/// Where the table stands in the documentation.
const SECTION: (&str, &str) = ("<!-- The matrix, from tests/src/chaos/matrix.rs -->\n", "<!-- End of the matrix -->\n");

#[tokio::test(flavor = "multi_thread")]
async fn processes_fail_and_no_promise_is_broken() -> anyhow::Result<()> {
    let case = |prompt, answer, drawn| Case { prompt, answer, drawn };
    let cases = vec![case(400, 20, false), case(20, 30, true), case(300, 250, true), case(40, 400, false)];
    let folder = tempfile::tempdir()?;
    let plan = Plan {
        seed: SEED,
        acts: vec![ActPlan { model: MODEL.into(), cases, clients: 6, time: Duration::from_secs(40) }],
        hits_min: 0,
        requests_min: 100,
        folder: folder.path().to_path_buf(),
    };
    let report = run(&plan, Err("the short form runs anywhere".into())).await?;
    println!("{report}");
    ensure!(report.is_kept(), "{report}\n{}", report.last_words(folder.path()));
    Ok(())
}

/// `UPDATE_EXPECT=1 cargo test --release -p baton-tests --test chaos` writes it anew.
#[test]
fn the_documentation_has_the_table() -> anyhow::Result<()> {
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/reliability.md"))?;
    let (before, rest) = page.split_once(SECTION.0).context("where the matrix begins")?;
    let (_, after) = rest.split_once(SECTION.1).context("where the matrix ends")?;
    let right = format!("{before}{}\n{}\n{}{after}", SECTION.0, rendered(), SECTION.1);
    expect_file!["../../docs/reliability.md"].assert_eq(&right);
    Ok(())
}
