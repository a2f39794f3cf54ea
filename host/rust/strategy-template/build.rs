// SPDX-License-Identifier: Apache-2.0
//! A plugin is never unloaded, whatever a host does (its threads and tables live as long as the process).
fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    println!("cargo::rerun-if-changed=build.rs");
}
