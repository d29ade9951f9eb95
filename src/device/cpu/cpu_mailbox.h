// The mailbox of devices in host memory: the stream's own thread raises and waits.
#pragma once

#include <memory>

#include "src/device/mailbox.h"

namespace sluice {

// REQUIRES: `pinned` is zeroed and of Mailbox::PinnedBytes(options); the options are valid; streams
// are HostStreams with a thread of their own.
std::unique_ptr<Mailbox> NewCpuMailbox(Buffer pinned, const MailboxOptions& options);

}  // namespace sluice
