// Tells whether a policy may have threads of its own on a device.
#pragma once

#include "absl/status/status.h"
#include "src/device/device.h"
#include "src/device/mailbox.h"

namespace sluice {

// A device that runs everything in one thread, in virtual time, has no mailbox for other threads.
inline bool HasThreads(Device& device) {
  return !absl::IsUnimplemented(device.NewMailbox(MailboxOptions{}).status());
}

}  // namespace sluice
