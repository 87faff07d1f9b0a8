//! The guest daemon: processes and files of a sandbox over HTTP, and the first process of its machine.
//!
//! One program in three roles: `/init` of the initramfs sets the machine up and becomes
//! the supervisor; the supervisor starts the daemon from its own executable and starts it
//! again when it dies; and on a host, for tests, `envd serve` is the daemon alone.

mod accounts;
mod answer;
mod app;
mod arguments;
mod blocking;
mod boot;
mod cgroup;
mod control;
mod daemon;
mod etc;
mod files;
mod filesystem;
mod http;
mod identity;
mod log;
mod metrics;
mod process;
mod store;
mod supervisor;
mod turns;

use std::process::ExitCode;

use arguments::Role;

fn main() -> ExitCode {
    sys::early::link();
    sys::signals::heed_all();
    sys::memory::use_little();
    let role = match arguments::role(std::env::args().collect(), std::process::id()) {
        Ok(role) => role,
        Err(message) => {
            eprintln!("envd: {message}\n\n{}", arguments::USAGE);
            return ExitCode::from(2);
        }
    };
    let ended = match role {
        Role::FirstProcess => boot::run(),
        Role::Supervisor(inherited) => supervisor::run_inherited(inherited),
        Role::Daemon(inherited) => daemon::run_in_guest(inherited),
        Role::Serve(options) => daemon::run_on_host(&options),
    };
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            say!("fatal: {error}");
            ExitCode::FAILURE
        }
    }
}
