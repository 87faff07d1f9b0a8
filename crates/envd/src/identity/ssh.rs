//! Host keys of an SSH server: a copy of a sandbox must not be able to pass for it.
//!
//! They are made by the image's own `ssh-keygen`, as a process of the workload and after it
//! runs: RSA takes long, and an image without an SSH server pays three looks into `/etc/ssh`.
//! What is done is remembered by the sandbox's id, so a daemon or a capture in between loses nothing.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use rustix::process::{Pid, Signal, kill_process};
use tokio::task::{spawn_blocking, spawn_local};

use crate::app::App;
use crate::{etc, process, say};

const DIRECTORY: &str = "/etc/ssh";
/// In the same directory, so that the new keys replace the old ones in one step.
const NEW: &str = "/etc/ssh/.aenv-new";
const PID_FILE: &str = "/run/sshd.pid";
/// Those that take no time first.
const KINDS: [&str; 3] = ["ed25519", "ecdsa", "rsa"];

/// Begins to renew the keys if they are those of another sandbox. At most one renewal runs.
pub(crate) fn renew_soon(app: &Rc<App>) {
    let settings = app.settings();
    if app.powers.identity
        && settings.sandbox_id.is_some()
        && settings.host_keys_of != settings.sandbox_id
        && !app.renewing_keys.replace(true)
    {
        let app = app.clone();
        spawn_local(async move {
            renew_all(&app).await;
            app.renewing_keys.set(false);
        });
    }
}

/// Goes on until the keys are those of the sandbox that this is by then: it may become another meanwhile.
async fn renew_all(app: &Rc<App>) {
    loop {
        let owner = app.settings().sandbox_id.clone();
        if app.settings().host_keys_of == owner {
            return;
        }
        for kind in spawn_blocking(present).await.unwrap_or_default() {
            if let Err(why) = renew(app, kind).await {
                say!("the SSH host key {kind} stays that of another sandbox: {why}");
            }
        }
        let _ = spawn_blocking(reload).await;
        let mut settings = (*app.settings()).clone();
        settings.host_keys_of = owner;
        if let Err(error) = app.change_settings(settings) {
            say!("settings: {error}");
            return;
        }
    }
}

/// The kinds of key that the image has.
pub(super) fn present() -> Vec<&'static str> {
    let is_there = |kind: &&str| fs::symlink_metadata(path_of(Path::new(DIRECTORY), kind)).is_ok_and(|m| m.is_file());
    KINDS.into_iter().filter(is_there).collect()
}

async fn renew(app: &Rc<App>, kind: &'static str) -> Result<(), String> {
    let lost = |error: &dyn std::fmt::Display| error.to_string();
    spawn_blocking(make_room).await.map_err(|e| lost(&e))?.map_err(|e| lost(&e))?;
    let made = path_of(Path::new(NEW), kind);
    let file = made.to_string_lossy();
    let command = ["ssh-keygen", "-q", "-t", kind, "-N", "", "-f", &file].map(str::to_owned);
    process::run_to_end(app, &command).await.map_err(|e| e.message)?;
    let moved = spawn_blocking(move || put_in_place(kind)).await.map_err(|e| lost(&e))?;
    moved.map_err(|error| format!("ssh-keygen made none ({error})"))
}

fn make_room() -> io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    match fs::remove_dir_all(NEW) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    fs::DirBuilder::new().mode(0o700).create(NEW)
}

fn put_in_place(kind: &str) -> io::Result<()> {
    let (made, old) = (path_of(Path::new(NEW), kind), path_of(Path::new(DIRECTORY), kind));
    fs::File::open(&made)?.sync_all()?;
    // The public half first: it is only read by people.
    fs::rename(made.with_extension("pub"), old.with_extension("pub"))?;
    fs::rename(&made, &old)?;
    fs::remove_dir_all(NEW)
}

fn path_of(directory: &Path, kind: &str) -> PathBuf {
    directory.join(format!("ssh_host_{kind}_key"))
}

/// Tells a server that runs to read its keys again; its connections go on.
fn reload() {
    let number = etc::read(Path::new(PID_FILE)).ok().flatten().and_then(|text| text.trim().parse().ok());
    let Some(pid) = number.and_then(Pid::from_raw) else { return };
    let name = etc::read(Path::new(&format!("/proc/{}/comm", pid.as_raw_nonzero()))).ok().flatten();
    if name.is_some_and(|name| name.trim() == "sshd") {
        let _ = kill_process(pid, Signal::HUP);
    }
}
