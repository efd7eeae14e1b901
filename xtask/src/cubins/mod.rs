//! Compiles the CUDA kernels for every target: `cargo xtask cubins [--out DIR] [--arch TARGET]... [--defects DIR]`.
//!
//! With `--defects`, also compiles them with one seeded defect each, into a folder of packs for each: a check of a GPU must find them.
//!
//! Each `*.cu` of `kernels/cu` becomes one cubin per target, by NVRTC, which needs neither a GPU nor a driver. What was compiled is kept
//! beside the compiler, so that a second run costs nothing. A warning, a spill, or a kernel over its budget is an error.

mod defects;
mod nvrtc;
mod pack;
mod sources;
mod usage;

use anyhow::{Context, bail, ensure};
use nvrtc::{Compiled, Nvrtc};
use pack::Module;
use sources::{FOLDER, File, Sources};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};
use usage::{Budgets, Usage};

/// Ampere, Ada, Hopper, Blackwell of data centers, other Blackwell. The suffix `a`: with instructions of that generation alone.
const TARGETS: [&str; 5] = ["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120"];
/// Where `scripts/setup-cuda` puts the compiler, and this what it compiled.
const CUDA: &str = "target/cuda";
const BUDGETS: &str = "budgets.txt";
/// The digest of the sources, which the engine expects packs to name.
const DIGEST: &str = "sources.digest";
/// No contraction and nothing approximate: the bits of the numerics classes are at stake.
const OPTIONS: [&str; 6] =
    ["--std=c++17", "-fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true", "--ptxas-options=-v"];

/// Compiles everything, prints a table, and writes one pack per target.
pub(crate) fn run(root: &Path, arguments: &[&str]) -> anyhow::Result<ExitCode> {
    let (mut out, mut targets, mut defects) = (root.join(CUDA).join("packs"), Vec::new(), None);
    let mut arguments = arguments.iter();
    while let Some(argument) = arguments.next() {
        let value = arguments.next().with_context(|| format!("{argument} has no value"))?;
        match *argument {
            "--out" => out = PathBuf::from(value),
            "--arch" => targets.push(*value),
            "--defects" => defects = Some(PathBuf::from(value)),
            _ => bail!("{argument} is none of --out, --arch and --defects"),
        }
    }
    if targets.is_empty() {
        targets.extend(TARGETS);
    }
    let began = Instant::now();
    let build = Build::new(root, &targets)?;
    print!("{}", build.table());
    build.check(root)?;
    std::fs::create_dir_all(&out)?;
    for target in &targets {
        let (path, bytes) = (out.join(format!("{target}.cubins")), build.pack(target));
        let modules = pack::manifest(&bytes)?["modules"].as_array().map_or(0, Vec::len);
        std::fs::write(&path, &bytes)?;
        println!("{}: {modules} modules, {} bytes", path.display(), bytes.len());
    }
    if let Some(folder) = defects {
        defects::write(root, &build, &targets, &folder)?;
    }
    println!("cubins: sources {}, {:.1} s", &build.digest[..16], began.elapsed().as_secs_f64());
    Ok(ExitCode::SUCCESS)
}

/// What became of one source for one target.
struct Unit {
    source: String,
    target: &'static str,
    cubin: Vec<u8>,
    kernels: BTreeMap<String, Usage>,
    warnings: String,
    /// None if it had been compiled before.
    took: Option<Duration>,
}

struct Build {
    digest: String,
    compiler: String,
    units: Vec<Unit>,
    /// Whether it is of all targets.
    whole: bool,
    /// What is wrong with the sources themselves.
    unbounded: Vec<String>,
}

impl Build {
    fn new(root: &Path, targets: &[&str]) -> anyhow::Result<Self> {
        let known = |target: &&str| {
            let found = TARGETS.iter().find(|known| *known == target);
            found.copied().with_context(|| format!("{target} is none of {}", TARGETS.join(", ")))
        };
        let targets: Vec<&'static str> = targets.iter().map(known).collect::<anyhow::Result<_>>()?;
        let sources = Sources::read(root)?;
        let compiler = std::fs::read_to_string(root.join(CUDA).join(".installed"))
            .with_context(|| format!("the compiler is not there: scripts/setup-cuda {CUDA}"))?;
        let compiler = compiler.trim().to_owned();
        let mut how = vec![compiler.clone()];
        how.extend(OPTIONS.map(str::to_owned));
        let kept = Kept { folder: root.join(CUDA).join("cubins") };
        std::fs::create_dir_all(&kept.folder)?;
        // Loading the compiler takes longer than all the rest of a run that compiles nothing.
        let nvrtc = OnceLock::new();
        let load = || nvrtc.get_or_init(|| Nvrtc::load(&root.join(CUDA).join("lib"))).as_ref();
        let jobs: Vec<(&File, &'static str)> =
            sources.units.iter().flat_map(|unit| targets.iter().map(move |target| (unit, *target))).collect();
        let one = |(file, target): (&File, &'static str)| -> anyhow::Result<Unit> {
            let name = file.path.trim_end_matches(".cu");
            let key = sources.digest_of(file, &how);
            let began = Instant::now();
            let (compiled, took) = match kept.find(name, target, &key) {
                Some(compiled) => (compiled, None),
                None => {
                    let nvrtc = load().map_err(|error| anyhow::anyhow!("{error:#}"))?;
                    let mut options = OPTIONS.map(str::to_owned).to_vec();
                    options.push(format!("--gpu-architecture={target}"));
                    options.push(format!("--include-path={}", root.join(FOLDER).display()));
                    let compiled = nvrtc.compile(&file.path, &file.text, &options)?;
                    kept.keep(name, target, &key, &compiled)?;
                    (compiled, Some(began.elapsed()))
                }
            };
            let warnings: Vec<&str> = compiled.log.lines().filter(|line| line.contains("warning")).collect();
            let (warnings, kernels) = (warnings.join("\n"), usage::of_log(&compiled.log)?);
            Ok(Unit { source: name.to_owned(), target, cubin: compiled.cubin, kernels, warnings, took })
        };
        let units =
            in_parallel(&jobs, |job| one(*job).with_context(|| format!("{FOLDER}/{} for {}", job.0.path, job.1)))?;
        let (digest, unbounded) = (sources.digest(&how), sources.unbounded());
        Ok(Self { digest, compiler, units, whole: targets.len() == TARGETS.len(), unbounded })
    }

    /// The most that each kernel takes on any target.
    fn most(&self) -> BTreeMap<String, Usage> {
        let mut most: BTreeMap<String, Usage> = BTreeMap::new();
        for (name, usage) in self.units.iter().flat_map(|unit| &unit.kernels) {
            let entry = most.entry(name.clone()).or_default();
            *entry = entry.max(*usage);
        }
        most
    }

    /// Registers of each kernel by target, and the time that each source took.
    fn table(&self) -> String {
        let mut targets: Vec<&str> = Vec::new();
        self.units.iter().for_each(|unit| {
            if !targets.contains(&unit.target) {
                targets.push(unit.target)
            }
        });
        let cells = |cell: &dyn Fn(&str) -> String| -> String {
            targets.iter().map(|target| format!("{:>9}", cell(target))).collect()
        };
        let unit =
            |source: &str, target: &str| self.units.iter().find(|unit| unit.source == source && unit.target == target);
        let mut text = format!("{:<26}{} {:>8} {:>7}\n", "registers", cells(&str::to_owned), "shared", "spills");
        let mut sources: Vec<&str> = self.units.iter().map(|unit| unit.source.as_str()).collect();
        sources.dedup();
        let most = self.most();
        for source in sources {
            let took = |target: &str| match unit(source, target).and_then(|unit| unit.took) {
                Some(took) => format!("{:.1} s", took.as_secs_f64()),
                None => "kept".to_owned(),
            };
            text += &format!("{:<26}{}\n", format!("{source}.cu"), cells(&took));
            let mut names: Vec<&String> =
                self.units.iter().filter(|unit| unit.source == source).flat_map(|unit| unit.kernels.keys()).collect();
            names.sort();
            names.dedup();
            for name in names {
                let registers = |target: &str| {
                    let usage = unit(source, target).and_then(|unit| unit.kernels.get(name));
                    usage.map_or("-".to_owned(), |usage| usage.registers.to_string())
                };
                let Usage { shared, spills, .. } = most[name];
                text += &format!("  {name:<24}{} {shared:>8} {spills:>7}\n", cells(&registers));
            }
        }
        text
    }

    fn pack(&self, target: &str) -> Vec<u8> {
        self.pack_with(target, None)
    }

    /// The same with another cubin in place of one source's.
    fn pack_with(&self, target: &str, other: Option<(&str, &[u8])>) -> Vec<u8> {
        let modules: Vec<Module<'_>> = self
            .units
            .iter()
            .filter(|unit| unit.target == target)
            .map(|unit| Module {
                name: &unit.source,
                kernels: unit.kernels.keys().map(String::as_str).collect(),
                cubin: other.filter(|(source, _)| *source == unit.source).map_or(&unit.cubin, |(_, cubin)| cubin),
            })
            .collect();
        pack::packed(target, &self.compiler, &self.digest, &modules)
    }

    /// Refuses warnings, spills, kernels without launch bounds, more than the budgets, and another digest than the engine's. Where
    /// `UPDATE_EXPECT` is set, writes these.
    fn check(&self, root: &Path) -> anyhow::Result<()> {
        let mut wrong = self.unbounded.clone();
        for unit in &self.units {
            if !unit.warnings.is_empty() {
                wrong.push(format!("{}.cu for {}:\n{}", unit.source, unit.target, unit.warnings));
            }
            let spilling = unit.kernels.iter().filter(|(_, usage)| usage.spills > 0);
            wrong.extend(
                spilling.map(|(name, usage)| {
                    format!("{name} for {} spills {} bytes of registers", unit.target, usage.spills)
                }),
            );
        }
        let (path, most) = (root.join(FOLDER).join(BUDGETS), self.most());
        if std::env::var_os("UPDATE_EXPECT").is_some() {
            ensure!(self.whole, "budgets are those of all targets: leave --arch out");
            let budgets = most.into_iter().map(|(name, usage)| (name, Usage { spills: 0, ..usage })).collect();
            std::fs::write(&path, Budgets(budgets).text())?;
            std::fs::write(root.join(FOLDER).join(DIGEST), format!("{}\n", self.digest))?;
        } else {
            let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
            let budgets = Budgets::parse(&text).with_context(|| path.display().to_string())?;
            wrong.extend(budgets.exceeded(&most, self.whole));
            let digest = std::fs::read_to_string(root.join(FOLDER).join(DIGEST)).unwrap_or_default();
            if digest.trim_end() != self.digest {
                wrong.push(format!("{FOLDER}/{DIGEST} is of other sources: UPDATE_EXPECT=1 cargo xtask cubins"));
            }
        }
        ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
        Ok(())
    }
}

/// What was compiled before, by the digest of what it was made from.
struct Kept {
    folder: PathBuf,
}

impl Kept {
    fn path(&self, name: &str, target: &str, key: &str, kind: &str) -> PathBuf {
        self.folder.join(format!("{}.{target}.{}.{kind}", name.replace('/', "-"), &key[..32]))
    }

    fn find(&self, name: &str, target: &str, key: &str) -> Option<Compiled> {
        // The log is written last.
        let log = std::fs::read_to_string(self.path(name, target, key, "log")).ok()?;
        Some(Compiled { cubin: std::fs::read(self.path(name, target, key, "cubin")).ok()?, log })
    }

    /// Keeps this, and nothing older of the same source and target.
    fn keep(&self, name: &str, target: &str, key: &str, compiled: &Compiled) -> anyhow::Result<()> {
        let former = format!("{}.{target}.", name.replace('/', "-"));
        for entry in std::fs::read_dir(&self.folder)? {
            let entry = entry?;
            if entry.file_name().to_string_lossy().starts_with(&former) {
                std::fs::remove_file(entry.path())?;
            }
        }
        for (kind, bytes) in [("cubin", &compiled.cubin[..]), ("log", compiled.log.as_bytes())] {
            let path = self.path(name, target, key, kind);
            let partial = path.with_extension("partial");
            std::fs::write(&partial, bytes)?;
            std::fs::rename(partial, path)?;
        }
        Ok(())
    }
}

/// Does all jobs on all cores. Results are in the order of the jobs; the first error ends it.
fn in_parallel<J: Sync, R: Send>(jobs: &[J], one: impl Fn(&J) -> anyhow::Result<R> + Sync) -> anyhow::Result<Vec<R>> {
    let (next, results) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let work = || {
        while let Some((at, job)) = Some(next.fetch_add(1, Ordering::Relaxed)).and_then(|at| Some((at, jobs.get(at)?)))
        {
            let result = one(job);
            if result.is_err() {
                next.store(jobs.len(), Ordering::Relaxed);
            }
            results.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).push((at, result));
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(work);
        }
    });
    let mut results = results.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
    results.sort_by_key(|(at, _)| *at);
    results.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn root() -> &'static Path {
        Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
    }

    /// `make test` installs the compiler first; by hand: `scripts/setup-cuda target/cuda`.
    #[test]
    fn every_kernel_compiles_for_every_target_within_its_budget() {
        let build = Build::new(root(), &TARGETS).unwrap_or_else(|error| panic!("{error:#}"));
        build.check(root()).unwrap_or_else(|error| panic!("{error:#}\n{}", build.table()));
        for target in TARGETS {
            let manifest = pack::manifest(&build.pack(target)).unwrap();
            assert_eq!((&manifest["target"], &manifest["digest"]), (&target.into(), &build.digest.as_str().into()));
        }
    }

    #[test]
    fn jobs_are_done_once_each_and_errors_end_them() {
        let jobs: Vec<usize> = (0..50).collect();
        assert_eq!(in_parallel(&jobs, |job| Ok(job * 2)).unwrap(), (0..50).map(|job| job * 2).collect::<Vec<_>>());
        let failing = |job: &usize| if *job == 7 { bail!("seven") } else { Ok(()) };
        assert_eq!(in_parallel(&jobs, failing).unwrap_err().to_string(), "seven");
    }

    #[test]
    fn only_what_was_made_from_the_same_is_found() {
        let folder = std::env::temp_dir().join(format!("baton-cubins-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let kept = Kept { folder: folder.clone() };
        let compiled = |byte: u8| Compiled { cubin: vec![byte], log: byte.to_string() };
        let keys = ["a".repeat(64), "b".repeat(64)];
        kept.keep("x", "sm_80", &keys[0], &compiled(1)).unwrap();
        kept.keep("x", "sm_89", &keys[0], &compiled(2)).unwrap();
        kept.keep("x", "sm_80", &keys[1], &compiled(3)).unwrap();
        let found = |target: &str, key: &String| kept.find("x", target, key).map(|compiled| compiled.cubin);
        assert_eq!([found("sm_80", &keys[0]), found("sm_80", &keys[1])], [None, Some(vec![3])]);
        assert_eq!([found("sm_89", &keys[0]), found("sm_89", &keys[1])], [Some(vec![2]), None]);
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
