//! A seeded defect: a remote pool that passes for host memory. Whoever dereferences its address ends the process.

use baton_memory::{HostPool, PoolMemory, RemoteConfig, RemotePool};
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::sync::Arc;

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
        .status()
        .unwrap();
    assert_eq!(child.signal(), Some(libc::SIGSEGV), "{child}");
}

#[test]
#[ignore = "ends its process"]
fn role_of_the_child() {
    dereferences(RemotePool::passing_for_host(4096, RemoteConfig::default()).unwrap());
}
