//! A seeded defect: a remote pool that passes for host memory. Whoever dereferences its address ends the process.

use baton_memory::{HostPool, PoolMemory, RemoteConfig, RemotePool};
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::sync::Arc;

/// Is there in that process alone.
const OTHER_PROCESS: &str = "BATON_TEST_OTHER_PROCESS";

fn dereferences(memory: Arc<dyn PoolMemory>) -> bool {
    let mut byte = [0];
    HostPool::of(&memory).is_some_and(|host| {
        host.copy_out(0, &mut byte);
        true
    })
}

#[test]
fn without_the_defect_there_is_no_address() {
    assert!(!dereferences(RemotePool::new(4096, RemoteConfig::default()).unwrap()));
}

#[test]
fn a_dereference_ends_the_process() {
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["role_of_the_child", "--exact", "--ignored", "--nocapture"])
        .env(OTHER_PROCESS, "")
        .status()
        .unwrap();
    assert_eq!(child.signal(), Some(libc::SIGSEGV), "{child}");
}

#[test]
#[ignore = "run by the tests of this file, in a process of its own, which it ends"]
fn role_of_the_child() {
    if std::env::var_os(OTHER_PROCESS).is_none() {
        return;
    }
    dereferences(RemotePool::passing_for_host(4096, RemoteConfig::default()).unwrap());
}
