import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.ByteBuffer;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.atomic.AtomicBoolean;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageQueue;

/**
 * Sends numbered messages with the official client and prints every acknowledgement.
 * Usage: AuditProducer NAMESRV TOPIC BROKER_NAME QUEUES THREADS. Reads lines `go` and `stop`; prints
 * `ACK number queueId queueOffset offsetMsgId` for each acknowledged message and `DONE` after a stop.
 */
public final class AuditProducer {
    private static final int BODY_BYTES_MAX = 3500;

    private AuditProducer() {
    }

    public static void main(String[] args) throws Exception {
        String topic = args[1];
        String brokerName = args[2];
        int queues = Integer.parseInt(args[3]);
        int threads = Integer.parseInt(args[4]);
        PrintStream out = new PrintStream(new java.io.FileOutputStream(java.io.FileDescriptor.out), false);
        DefaultMQProducer producer = new DefaultMQProducer("audit_producer");
        producer.setNamesrvAddr(args[0]);
        // A retry would store one number at two places, and both would be right.
        producer.setRetryTimesWhenSendFailed(0);
        producer.setRetryTimesWhenSendAsyncFailed(0);
        producer.setSendMsgTimeout(1000);
        producer.start();
        AtomicLong numbers = new AtomicLong(1L << 40);
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in));
        out.println("READY");
        out.flush();
        for (String line = in.readLine(); "go".equals(line); line = in.readLine()) {
            AtomicBoolean stop = new AtomicBoolean();
            // Kept until the stop: nobody reads the pipe before, and a full pipe would hold the senders up.
            StringBuffer acknowledged = new StringBuffer();
            List<Thread> running = new ArrayList<>();
            for (int t = 0; t < threads; t++) {
                Thread thread = new Thread(() -> {
                    while (!stop.get()) {
                        long number = numbers.getAndIncrement();
                        try {
                            MessageQueue queue = new MessageQueue(topic, brokerName, (int) (number % queues));
                            SendResult r = producer.send(new Message(topic, body(number)), queue);
                            if (r.getSendStatus() == SendStatus.SEND_OK) {
                                acknowledged.append("ACK " + number + " " + r.getMessageQueue().getQueueId() + " "
                                    + r.getQueueOffset() + " " + r.getOffsetMsgId() + "\n");
                            }
                        } catch (Exception e) {
                            System.err.println(number + ": " + e);
                            pause();
                        }
                    }
                });
                thread.start();
                running.add(thread);
            }
            in.readLine();
            stop.set(true);
            for (Thread thread : running) {
                thread.join();
            }
            out.print(acknowledged);
            out.println("DONE");
            out.flush();
        }
        Runtime.getRuntime().halt(0);
    }

    private static void pause() {
        try {
            Thread.sleep(10);
        } catch (InterruptedException e) {
            Thread.currentThread().interrupt();
        }
    }

    /** The body that the audit expects of a number: number, length, filler made from the number. */
    static byte[] body(long number) {
        int bytes = 16 + (int) (number * 131 % (BODY_BYTES_MAX - 16));
        ByteBuffer out = ByteBuffer.allocate(bytes + 8);
        out.putLong(number).putLong(bytes);
        long state = number | 1;
        while (out.position() < bytes) {
            state ^= state << 13;
            state ^= state >>> 7;
            state ^= state << 17;
            out.putLong(state * 0x2545F4914F6CDD1DL);
        }
        byte[] body = new byte[bytes];
        System.arraycopy(out.array(), 0, body, 0, bytes);
        return body;
    }
}
