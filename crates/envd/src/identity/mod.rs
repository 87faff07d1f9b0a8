//! What makes a sandbox a different one from its template: applied before any of its code runs on.
//!
//! The steps are in an order in which a failure never leaves the workload running with an
//! old clock, old random numbers or an old name: thawing is the last of them.

mod ca;
mod hosts;
mod new_user;
mod ssh;

use std::io;
use std::path::Path;

use rustix::time::{ClockId, Timespec, clock_settime};
use wire::init::{Change, InitRequest, Settings, sanitise_hostname};
use wire::time::Timestamp;

use crate::accounts;
use crate::app::App;
use crate::cgroup::OrderError;
use crate::etc;
use crate::say;

pub(crate) use hosts::set_hostname;
pub(crate) use ssh::renew_soon;

/// Less is not worth calling a seed.
const MIN_ENTROPY_BYTES: usize = 32;

/// Why `/init` did not do all it was asked; the workload is then as frozen as before.
pub(crate) enum Failure {
    /// Nothing was changed.
    Invalid(String),
    /// Nothing was changed: the request names a CA bundle that has to be sent along.
    BundleWanted,
    Step {
        step: &'static str,
        error: io::Error,
    },
}

/// Applies *request*, and lets the workload run unless it says otherwise.
pub(crate) fn apply(app: &App, request: InitRequest) -> Result<(), Failure> {
    let timestamp = check(&request).map_err(Failure::Invalid)?;
    let mut settings = (*app.settings()).clone();
    let powers = app.powers;
    let bundle = request.ca_bundle.filter(|bundle| !bundle.is_empty());
    let has_bundle = request.ca_digest.is_some() && request.ca_digest == settings.ca_digest;
    if powers.identity && bundle.is_none() && request.ca_digest.is_some() && !has_bundle {
        return Err(Failure::BundleWanted);
    }

    settings.initialised = true;
    if let Some(secret) = request.control_secret {
        settings.control_secret = Some(secret);
    }
    if let Some(now) = timestamp.filter(|_| powers.kernel) {
        step("clock", set_clock(now))?;
    }
    if let Some(seed) = request.entropy.filter(|_| powers.kernel) {
        step("entropy", sys::random::reseed(&seed))?;
    }
    if let Some(name) = request.hostname.filter(|_| powers.identity) {
        step("hostname", set_hostname(&sanitise_hostname(&name)))?;
    }
    if let Some(id) = request.machine_id.filter(|_| powers.identity) {
        let line = format!("{}\n", id.to_ascii_lowercase());
        if let Err(error) = etc::overwrite(Path::new("/etc/machine-id"), &line, 0o444, false) {
            say!("/etc/machine-id: {error}");
        }
    }
    if let Some(bundle) = bundle.filter(|_| powers.identity && !has_bundle) {
        settings.ca_installed = Some(step("caBundle", ca::install(&bundle, settings.ca_installed.as_deref()))?);
        settings.ca_digest = request.ca_digest;
    }
    match request.access_token {
        Change::Keep => {}
        Change::Set(token) if !token.is_empty() => settings.access_token = Some(token),
        Change::Set(_) | Change::Remove => settings.access_token = None,
    }
    // One that was made sure of before is not looked for again: this is on the way of every restore.
    if let Some(name) =
        request.default_user.filter(|name| !name.is_empty() && settings.default_user.as_ref() != Some(name))
    {
        step("defaultUser", ensure_user(&name, powers.identity))?;
        settings.default_user = Some(name);
    }
    set_environment(&mut settings, request.env_vars, request.sandbox_id, request.template_id);
    if let Some(directory) = request.default_workdir {
        settings.default_workdir = (!directory.is_empty()).then_some(directory);
    }
    if powers.identity && settings.host_keys_of != settings.sandbox_id && ssh::present().is_empty() {
        settings.host_keys_of.clone_from(&settings.sandbox_id);
    }
    step("settings", app.change_settings(settings))?;

    if let Some(groups) = &app.groups {
        groups.start_anew();
        if request.thaw.unwrap_or(true) {
            match groups.thaw(None) {
                Ok(()) | Err(OrderError::Late) => {}
                Err(OrderError::Failed(error)) => step("thaw", Err(error))?,
            }
        }
    }
    Ok(())
}

fn step<T>(step: &'static str, result: io::Result<T>) -> Result<T, Failure> {
    result.map_err(|error| Failure::Step { step, error })
}

/// Refuses what could only fail half-way.
fn check(request: &InitRequest) -> Result<Option<Timestamp>, String> {
    let timestamp = match request.timestamp.as_deref().filter(|text| !text.is_empty()) {
        None => None,
        Some(text) => Some(Timestamp::parse(text).ok_or("timestamp is not an RFC 3339 time")?),
    };
    if request.entropy.as_ref().is_some_and(|seed| seed.len() < MIN_ENTROPY_BYTES) {
        return Err(format!("entropy must have at least {MIN_ENTROPY_BYTES} bytes"));
    }
    if request.machine_id.as_ref().is_some_and(|id| id.len() != 32 || !id.bytes().all(|b| b.is_ascii_hexdigit())) {
        return Err("machineId must be 32 hexadecimal digits".to_owned());
    }
    if request.control_secret.as_ref().is_some_and(String::is_empty) {
        return Err("controlSecret must not be empty".to_owned());
    }
    if request.default_workdir.as_ref().is_some_and(|d| !d.is_empty() && (!d.starts_with('/') || d.contains('\0'))) {
        return Err("defaultWorkdir must be an absolute path".to_owned());
    }
    if let Some(name) = request.default_user.as_deref().filter(|name| !name.is_empty()) {
        new_user::check_name(name)?;
    }
    for (name, value) in request.env_vars.iter().flatten() {
        if name.is_empty() || name.contains(['=', '\0']) || value.contains('\0') {
            return Err(format!("{name:?} cannot be an environment variable"));
        }
    }
    if let Some(bundle) = request.ca_bundle.as_deref().filter(|bundle| !bundle.is_empty()) {
        ca::check(bundle)?;
    }
    Ok(timestamp)
}

fn set_clock(now: Timestamp) -> io::Result<()> {
    let time = Timespec { tv_sec: now.seconds, tv_nsec: now.nanos.into() };
    Ok(clock_settime(ClockId::Realtime, time)?)
}

fn ensure_user(name: &str, may_create: bool) -> io::Result<()> {
    match accounts::lookup(name)? {
        Some(_) => Ok(()),
        None if may_create => new_user::create(name),
        None => Err(io::Error::new(io::ErrorKind::NotFound, format!("there is no user {name}"))),
    }
}

fn set_environment(
    settings: &mut Settings,
    variables: Option<std::collections::BTreeMap<String, String>>,
    sandbox_id: Option<String>,
    template_id: Option<String>,
) {
    if let Some(variables) = variables {
        settings.env_vars = variables;
    }
    if sandbox_id.is_some() {
        settings.sandbox_id = sandbox_id;
    }
    if template_id.is_some() {
        settings.template_id = template_id;
    }
}
